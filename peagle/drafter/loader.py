"""Reads a published head from a directory, in whichever of the three layouts it is.

Flat P-EAGLE heads, plain EAGLE heads (1 to 3) and speculators end up as one `DraftHead`. Every tensor of the files must
be known and have the wanted shape, and every parameter must be found; a head that is half loaded drafts badly and says
nothing. Owns completing and checking. Refuses to convert weights for speed (`layers.linear`) and to fetch anything.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from peagle.drafter.config_keys import parse_head_config
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig, TargetShape
from peagle.drafter.head_files import HeadFiles
from peagle.drafter.merging_head import make_head
from peagle.drafter.rope import RotaryEmbedding
from peagle.errors import ModelLoadError

EMBEDDINGS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_OFFSETS, _MASK, _TARGET_NORM = "draft_to_target_offsets", "mask_hidden", "target_norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedWeights:
    """Weights of the target that heads without their own use."""

    embed_tokens: Tensor | None = None  # [V, H_t]
    lm_head: Tensor | None = None  # [V, H_t]
    final_norm: Tensor | None = None  # [H_t], for heads on the target's last hidden state


def read_head_config(directory: Path | str, target: TargetShape) -> HeadConfig:
    """What a head is, without reading its weights.

    Raises:
        ModelLoadError: see `load_head`.
    """
    return _read_config(HeadFiles(Path(directory)), target)


def missing_tables(directory: Path | str) -> Collection[str]:
    """Which of `EMBEDDINGS` and `LM_HEAD` a head leaves to its target."""
    return {EMBEDDINGS, LM_HEAD} - HeadFiles(Path(directory)).file_names.keys()


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
        directory: holds config.json and the weights.
        target: what the head has to fit.
        shared: the target's tables, for heads that leave them out.
        dtype: float type of parameters and arithmetic.
        device: where to.

    Raises:
        ModelLoadError: files are missing or broken, or do not describe a head for this target.
    """
    files = HeadFiles(Path(directory))
    config = _read_config(files, target)
    with torch.device("meta"):  # no memory and no random numbers for parameters that are replaced at once
        head = make_head(config)
    head.rotary = RotaryEmbedding(config)
    tensors = _complete(files.read_tensors(), config, shared or SharedWeights())
    _check_shapes(tensors, head, files)
    _check_offsets(tensors[_OFFSETS], config)
    head.load_state_dict({name: _as_parameter(tensor, dtype, device) for name, tensor in tensors.items()}, assign=True)
    return head.requires_grad_(False).to(device).eval()


def _read_config(files: HeadFiles, target: TargetShape) -> HeadConfig:
    values = files.config_values
    config = parse_head_config(values, target, files.file_names)
    _check_mask(files.file_names, config)
    return config


def _as_parameter(tensor: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def _check_mask(names: Collection[str], config: HeadConfig) -> None:
    if config.is_parallel and _MASK not in names:
        raise ModelLoadError(
            "the draft head has no mask_hidden: it is a plain EAGLE-3 head, which drafts one token after the other, "
            "and cannot draft in parallel, though its config.json names a mask token; use a P-EAGLE head"
        )
    if _MASK in names and not config.is_parallel:
        raise ModelLoadError(
            "the draft head has mask_hidden, but its config.json names no mask token (ptd_token_id or "
            "mask_token_id), so nobody knows which embedding its mask slots have"
        )


def _complete(tensors: dict[str, Tensor], config: HeadConfig, shared: SharedWeights) -> dict[str, Tensor]:
    """Fill in what a head may leave out."""
    if _MASK in tensors:
        tensors[_MASK] = tensors[_MASK].flatten()  # published as [1, 1, n_aux * H_t]
    has_offsets = _OFFSETS in tensors
    offsets = tensors.get(_OFFSETS, torch.zeros(config.draft_vocab_size))
    tensors[_OFFSETS] = offsets.to(torch.int64)
    if EMBEDDINGS not in tensors:
        tensors[EMBEDDINGS] = _share(EMBEDDINGS, shared.embed_tokens, config)
    if LM_HEAD not in tensors:
        if config.draft_vocab_size < config.vocab_size and not has_offsets:
            raise ModelLoadError("the draft head has neither lm_head.weight nor d2t, so its draft tokens are unknown")
        tensors[LM_HEAD] = _drafted_rows(_share(LM_HEAD, shared.lm_head, config), tensors[_OFFSETS], config)
    if config.reads_last_hidden:
        if shared.final_norm is None:
            raise ModelLoadError(
                "the draft head reads the target's last hidden state behind the final norm, whose weight was not found "
                "in the target's checkpoint"
            )
        tensors[_TARGET_NORM] = shared.final_norm.detach()
    return tensors


def _drafted_rows(table: Tensor, offsets: Tensor, config: HeadConfig) -> Tensor:
    """The target's lm_head, or its rows of the tokens that the head drafts."""
    if config.draft_vocab_size == config.vocab_size and not offsets.any():
        return table
    _check_offsets(offsets, config)
    return table[torch.arange(config.draft_vocab_size) + offsets]


def _share(name: str, table: Tensor | None, config: HeadConfig) -> Tensor:
    wanted = [config.vocab_size, config.hidden_size]
    if table is None:
        raise ModelLoadError(f"the draft head has no {name}, and the target's table cannot be shared with it")
    if list(table.shape) != wanted:
        raise ModelLoadError(
            f"the draft head has no {name}, and the target's has the shape {list(table.shape)} instead of {wanted}"
        )
    return table.detach()


def _check_shapes(tensors: dict[str, Tensor], head: nn.Module, files: HeadFiles) -> None:
    wanted = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    missing = sorted(files.file_name(name) for name in wanted.keys() - tensors.keys())
    if missing:
        raise ModelLoadError(f"draft head: missing tensors: {', '.join(missing)}")
    unknown = sorted(files.file_name(name) for name in tensors.keys() - wanted.keys())
    if unknown:
        raise ModelLoadError(f"draft head: unknown tensors: {', '.join(unknown)}; it would not be computed exactly")
    for name, shape in wanted.items():
        if list(tensors[name].shape) != shape:
            raise ModelLoadError(
                f"draft head: {files.file_name(name)} has the shape {list(tensors[name].shape)}, "
                f"but config.json asks for {shape}"
            )


def _check_offsets(offsets: Tensor, config: HeadConfig) -> None:
    if list(offsets.shape) != [config.draft_vocab_size]:
        raise ModelLoadError(
            f"draft head: d2t has the shape {list(offsets.shape)}, but config.json asks for [{config.draft_vocab_size}]"
        )
    ids = torch.arange(config.draft_vocab_size) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ModelLoadError(
            f"draft head: d2t leads to token ids between {int(ids.min())} and {int(ids.max())}, outside the "
            f"vocabulary of {config.vocab_size}; it must hold offsets, not ids"
        )
