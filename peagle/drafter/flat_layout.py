"""Names of a head's tensors in files, to and fro.

In the flat layout, EAGLE-3's with P-EAGLE's `mask_hidden`, the first layer is `midlayer` and the later ones `layers.1`
and on; elsewhere it is `layers.0`. Everywhere `d2t` holds offsets from draft to target ids, and `t2d` marks the target
ids that have a draft id. Owns the renaming. Refuses to read or write files.
"""

from __future__ import annotations

_OFFSETS = "draft_to_target_offsets"
_FIRST_LAYER, _MIDLAYER = "layers.0.", "midlayer."
# What follows from the rest, or belongs to training.
_UNREAD = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
_FREQUENCIES = "rotary_emb.inv_freq"  # older Llamas saved them; they follow from config.json


def to_parameter_name(file_name: str) -> str | None:
    """The head's name of a tensor in a file, of any layout; None if the tensor is not needed."""
    name = file_name.removeprefix("model.")
    if name in _UNREAD or name.endswith(_FREQUENCIES):
        return None
    if name == "d2t":
        return _OFFSETS
    if name.startswith(_MIDLAYER):
        return _FIRST_LAYER + name.removeprefix(_MIDLAYER)
    return name


def to_file_name(parameter_name: str, *, first_layer: str = _MIDLAYER) -> str:
    """The published name of one of the head's tensors.

    Args:
        parameter_name: the head's own.
        first_layer: what the names of the first layer's tensors begin with.
    """
    if parameter_name == _OFFSETS:
        return "d2t"
    if parameter_name.startswith(_FIRST_LAYER):
        return first_layer + parameter_name.removeprefix(_FIRST_LAYER)
    return parameter_name


def first_layer_prefix(file_names: list[str]) -> str:
    """What the names of the first layer's tensors begin with in these files."""
    names = [name.removeprefix("model.") for name in file_names]
    has_plain = any(name.startswith(_FIRST_LAYER) for name in names)
    return _FIRST_LAYER if has_plain and not any(name.startswith(_MIDLAYER) for name in names) else _MIDLAYER
