"""Reads a published P-EAGLE head from a directory: config.json and safetensors, flat layout.

Every tensor of the files must be known and have the wanted shape, and every parameter must be found; a head that is
half loaded drafts badly and says nothing. Owns reading and checking. Refuses to convert weights for speed
(`layers.linear`) and to fetch anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from peagle.drafter.flat_layout import to_file_name, to_parameter_name
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig, TargetShape, read_head_config
from peagle.drafter.rope import RotaryEmbedding
from peagle.errors import ModelLoadError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedWeights:
    """Tables of the target that a head without its own uses."""

    embed_tokens: Tensor | None = None  # [V, H_t]
    lm_head: Tensor | None = None  # [V, H_t]


def load_head(
    directory: Path | str,
    *,
    target: TargetShape,
    shared: SharedWeights | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DraftHead:
    """Load a head for inference (parameters need no gradient).

    Args:
        directory: holds config.json and *.safetensors.
        target: what the head has to fit.
        shared: the target's tables, for heads that leave them out.
        dtype: float type of parameters and arithmetic.
        device: where to.

    Raises:
        ModelLoadError: files are missing or broken, or do not describe a P-EAGLE head for this target.
    """
    directory = Path(directory)
    config = read_head_config(directory / "config.json", target)
    with torch.device("meta"):  # no memory and no random numbers for parameters that are replaced at once
        head = DraftHead(config)
    head.rotary = RotaryEmbedding(config)
    tensors = _complete(_read_tensors(directory), config, shared or SharedWeights())
    _check_shapes(tensors, head)
    _check_offsets(tensors["draft_to_target_offsets"], config)
    head.load_state_dict({name: _as_parameter(tensor, dtype, device) for name, tensor in tensors.items()}, assign=True)
    return head.requires_grad_(False).to(device).eval()


def _as_parameter(tensor: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"cannot read {index}: {error!r}") from None
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise ModelLoadError(f"draft head: {index.name} lists files that are missing: {', '.join(missing)}")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        has_pickle = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
        hint = "; its weights are pickled: convert them to safetensors" if has_pickle else ""
        raise ModelLoadError(f"no *.safetensors in {directory}{hint}")
    return files


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors under the head's own names."""
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(directory):
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from None
        for file_name, tensor in found.items():
            name = to_parameter_name(file_name)
            if name in tensors:
                raise ModelLoadError(f"draft head: {file_name} is given twice")
            if name is not None:
                tensors[name] = tensor.clone()  # out of the file's mapping: aligned, and safe from changes to the file
    return tensors


def _complete(tensors: dict[str, Tensor], config: HeadConfig, shared: SharedWeights) -> dict[str, Tensor]:
    """Fill in what a head may leave out, and refuse one that cannot draft in parallel."""
    if config.is_parallel and "mask_hidden" not in tensors:
        raise ModelLoadError(
            "the draft head has no mask_hidden: it is a plain EAGLE-3 head, which drafts one token after the other, "
            "and cannot draft in parallel; use a P-EAGLE head"
        )
    if "mask_hidden" in tensors:
        if not config.is_parallel:
            raise ModelLoadError(
                "the draft head has mask_hidden, but its config.json names no mask token (ptd_token_id or "
                "mask_token_id), so nobody knows which embedding its mask slots have"
            )
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()  # published as [1, 1, n_aux * H_t]
    has_offsets = "draft_to_target_offsets" in tensors
    if "draft_to_target_offsets" not in tensors:
        tensors["draft_to_target_offsets"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    tensors["draft_to_target_offsets"] = tensors["draft_to_target_offsets"].to(torch.int64)
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = _share("embed_tokens.weight", shared.embed_tokens, config, config.vocab_size)
    if "lm_head.weight" not in tensors:
        rows = _share("lm_head.weight", shared.lm_head, config, config.vocab_size)
        _check_offsets(tensors["draft_to_target_offsets"], config)
        if config.draft_vocab_size < config.vocab_size and not has_offsets:
            raise ModelLoadError("the draft head has neither lm_head.weight nor d2t, so its draft tokens are unknown")
        if config.draft_vocab_size < config.vocab_size:  # those of the tokens that the head drafts
            rows = rows[torch.arange(config.draft_vocab_size) + tensors["draft_to_target_offsets"]]
        tensors["lm_head.weight"] = rows
    return tensors


def _share(name: str, table: Tensor | None, config: HeadConfig, num_rows: int) -> Tensor:
    wanted = [num_rows, config.hidden_size]
    if table is None:
        raise ModelLoadError(f"the draft head has no {name}, and the target's table cannot be shared with it")
    if list(table.shape) != wanted:
        raise ModelLoadError(
            f"the draft head has no {name}, and the target's has the shape {list(table.shape)} instead of {wanted}"
        )
    return table.detach()


def _check_shapes(tensors: dict[str, Tensor], head: nn.Module) -> None:
    wanted = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    missing = sorted(to_file_name(name) for name in wanted.keys() - tensors.keys())
    if missing:
        raise ModelLoadError(f"draft head: missing tensors: {', '.join(missing)}")
    unknown = sorted(to_file_name(name) for name in tensors.keys() - wanted.keys())
    if unknown:
        raise ModelLoadError(f"draft head: unknown tensors: {', '.join(unknown)}; it would not be computed exactly")
    for name, shape in wanted.items():
        if list(tensors[name].shape) != shape:
            raise ModelLoadError(
                f"draft head: {to_file_name(name)} has the shape {list(tensors[name].shape)}, "
                f"but config.json asks for {shape}"
            )


def _check_offsets(offsets: Tensor, config: HeadConfig) -> None:
    ids = torch.arange(config.draft_vocab_size) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ModelLoadError(
            f"draft head: d2t leads to token ids between {int(ids.min())} and {int(ids.max())}, outside the "
            f"vocabulary of {config.vocab_size}; it must hold offsets, not ids"
        )
