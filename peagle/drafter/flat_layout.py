"""Names of a head's tensors in the flat layout, to and fro.

The layout is EAGLE-3's with P-EAGLE's `mask_hidden`: the first layer is `midlayer`, the later ones `layers.1` and on,
`d2t` holds offsets from draft to target ids, `t2d` marks the target ids that have a draft id. Owns the renaming.
Refuses to read or write files.
"""

from __future__ import annotations

_OFFSETS = "draft_to_target_offsets"


def to_parameter_name(file_name: str) -> str | None:
    """The head's name of a tensor in a file; None for `t2d`, which follows from `d2t`."""
    name = file_name.removeprefix("model.")
    if name == "t2d":
        return None
    if name == "d2t":
        return _OFFSETS
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return name


def to_file_name(parameter_name: str) -> str:
    """The published name of one of the head's tensors."""
    if parameter_name == _OFFSETS:
        return "d2t"
    if parameter_name.startswith("layers.0."):
        return "midlayer." + parameter_name.removeprefix("layers.0.")
    return parameter_name
