"""What is done to raw logits before the temperature: bias, penalties, and forbidden tokens. Each row on its own.

The order is that of vLLM: logit_bias, then the repetition penalty (Keskar et al., "CTRL", 2019, section 4.1), the
frequency and the presence penalty, and last of all the masks, by strength: a mask that would leave no token of those
that the stronger ones have left is passed over, so that every row has a distribution.

Every operation is elementwise, so a row's result does not depend on its neighbours; and tokens before the row are
those of its own path, drafts included, so it does not depend on speculation either. Owns the arithmetic. Refuses to
know where rows and grammars come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.sampling.batch import SamplingRow
from peagle.sampling.context import IntArray, RowContext
from peagle.sampling.logits import at_least_float32

_WORD_BITS = 32


def adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The logits that tokens are drawn from. The very same tensor if no row has a context; never changed in place.

    Args:
        logits: [R, V].
        rows: R rows.
    """
    indices = [index for index, row in enumerate(rows) if row.context is not None]
    if not indices:
        return logits
    contexts = [row.context for row in rows if row.context is not None]
    index = torch.tensor(indices, dtype=torch.int64, device=logits.device)
    chosen = at_least_float32(logits[index])  # [G, V], a copy
    _add_bias(chosen, contexts)
    _penalise(chosen, contexts)
    _forbid(chosen, contexts)
    if len(indices) == len(rows):
        return chosen
    return at_least_float32(logits).index_copy(0, index, chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Entries of [G, V] logits, each at most once."""

    flat: Tensor  # [N] int64
    values: Tensor  # [N] in the logits' type, or whatever belongs to the entries

    @classmethod
    def of(
        cls, logits: Tensor, rows: Sequence[int], token_ids: Sequence[IntArray], values: Sequence[NDArray[Any]]
    ) -> _Places:
        """Flatten per-row arrays; ids that the logits do not have are left out."""
        vocab_size = logits.shape[1]
        lengths = [len(ids) for ids in token_ids]
        ids = np.concatenate(token_ids)
        flat = np.repeat(np.asarray(rows, dtype=np.int64), lengths) * vocab_size + ids
        is_there = (ids >= 0) & (ids < vocab_size)
        return cls(
            flat=torch.from_numpy(flat[is_there]).to(logits.device),
            values=torch.from_numpy(np.concatenate(values)[is_there]).to(logits.device),
        )


def _add_bias(logits: Tensor, contexts: Sequence[RowContext]) -> None:
    """Add `logit_bias` to logits [G, V] in place."""
    rows = [row for row, context in enumerate(contexts) if context.sequence.params.logit_bias]
    if not rows:
        return
    pairs = [contexts[row].sequence.params.logit_bias for row in rows]
    places = _Places.of(
        logits,
        rows,
        [np.array([token_id for token_id, _ in some], dtype=np.int64) for some in pairs],
        [np.array([bias for _, bias in some], dtype=np.float64) for some in pairs],
    )
    entries = logits.view(-1)
    entries[places.flat] = entries[places.flat] + places.values.to(logits.dtype)


def _penalise(logits: Tensor, contexts: Sequence[RowContext]) -> None:
    """Apply the three penalties to logits [G, V] in place."""
    rows = [row for row, context in enumerate(contexts) if context.sequence.params.has_penalties]
    if not rows:
        return
    counts = [contexts[row].counts for row in rows]
    places = _Places.of(logits, rows, [c.token_ids for c in counts], [c.in_output for c in counts])
    row_of = places.flat // logits.shape[1]

    def knob(name: str) -> Tensor:
        values = [getattr(context.sequence.params, name) for context in contexts]
        return torch.tensor(values, dtype=torch.float64, device=logits.device).to(logits.dtype)[row_of]  # [N]

    entries = logits.view(-1)
    raw = entries[places.flat]  # [N]
    repetition = knob("repetition_penalty")
    times = places.values.to(logits.dtype)
    penalised = torch.where(raw > 0, raw / repetition, raw * repetition)
    penalised = penalised - knob("frequency_penalty") * times
    penalised = penalised - knob("presence_penalty") * (times > 0)
    # A tiny repetition penalty must not make an infinity of a number; an infinity that the model made stays one.
    largest = torch.finfo(logits.dtype).max
    entries[places.flat] = torch.where(raw.isfinite(), penalised.clamp(-largest, largest), penalised)


def _forbid(logits: Tensor, contexts: Sequence[RowContext]) -> None:
    """Set the logits [G, V] of forbidden tokens to -inf, in place."""
    masks = (_grammar_mask, _allowed_mask, _bad_words_mask, _min_tokens_mask)  # by strength
    kept: Tensor | None = None  # [G, V] bool
    for mask in masks:
        found = mask(logits, contexts)
        if found is None:
            continue
        if kept is None:
            kept = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        index = torch.tensor(found.rows, dtype=torch.int64, device=logits.device)
        before = kept[index]
        narrowed = before & found.allowed
        kept[index] = torch.where(narrowed.any(1, keepdim=True), narrowed, before)
    if kept is not None:
        logits.masked_fill_(~kept, -torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mask:
    """Tokens that some rows may draw."""

    rows: list[int]  # g of them
    allowed: Tensor  # [g, V] bool


def _grammar_mask(logits: Tensor, contexts: Sequence[RowContext]) -> _Mask | None:
    rows = [row for row, context in enumerate(contexts) if context.allowed_mask is not None]
    if not rows:
        return None
    masks = [mask for context in contexts if (mask := context.allowed_mask) is not None]
    words = torch.from_numpy(np.stack(masks)).to(logits.device)  # [g, W]
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    unpacked = (words[:, :, None] >> bits).bitwise_and_(1).flatten(1).bool()  # [g, 32 W]
    allowed = torch.zeros(len(rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    width = min(allowed.shape[1], unpacked.shape[1])
    allowed[:, :width] = unpacked[:, :width]
    return _Mask(rows=rows, allowed=allowed)


def _allowed_mask(logits: Tensor, contexts: Sequence[RowContext]) -> _Mask | None:
    return _listed(
        logits,
        contexts,
        lambda context: None if context.sequence.params.allowed_token_ids is None else context.sequence.allowed,
        is_allowed=True,
    )


def _bad_words_mask(logits: Tensor, contexts: Sequence[RowContext]) -> _Mask | None:
    def listed(context: RowContext) -> IntArray | None:
        if not context.sequence.params.bad_words:
            return None
        return np.asarray(context.bad_token_ids(), dtype=np.int64)

    return _listed(logits, contexts, listed, is_allowed=False)


def _min_tokens_mask(logits: Tensor, contexts: Sequence[RowContext]) -> _Mask | None:
    return _listed(
        logits, contexts, lambda context: context.sequence.ends if context.is_too_early else None, is_allowed=False
    )


def _listed(
    logits: Tensor,
    contexts: Sequence[RowContext],
    listed: Callable[[RowContext], IntArray | None],
    *,
    is_allowed: bool,
) -> _Mask | None:
    """A mask of listed tokens: they are the only ones that are allowed, or the only ones that are not."""
    lists = {row: ids for row, context in enumerate(contexts) if (ids := listed(context)) is not None}
    if not lists:
        return None
    allowed = torch.full((len(lists), logits.shape[1]), not is_allowed, dtype=torch.bool, device=logits.device)
    token_ids = list(lists.values())
    places = _Places.of(logits, range(len(lists)), token_ids, token_ids)
    allowed.view(-1)[places.flat] = is_allowed
    return _Mask(rows=list(lists), allowed=allowed)
