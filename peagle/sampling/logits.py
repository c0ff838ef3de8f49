"""From logits to the target distribution: temperature, min_p, top_k, top_p. Pure functions, each row on its own.

Weights are `exp((logit - max) / temperature)` in the logits' type (float32 at least), and every sum over them is a
running sum in float64. On a CPU a running sum is sequential, so a row's result is the same to the last bit whatever
else is in the batch; a pairwise sum would not promise that. Order of likelihood means larger logits first, lower token
ids first among equal ones.

A sort of 49,152 logits costs 3 ms a row on a CPU, the largest 256 of them 0.1 ms. So truncation first looks at the
most likely tokens only, notices when they were too few, and looks further for those rows alone. The result is exactly
that of `reference`, which sorts everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.sampling.argmax import first_argmax
from peagle.sampling.batch import SamplingMetadata

_FIRST_WIDTH = 256  # candidates that top_p alone tries first
_SECOND_WIDTH = 4096
_PLAIN_ROWS = 2  # whole rows of a vocabulary whose noise stays in a CPU's cache from one operation to the next


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Unnormalised distributions of G rows over candidate tokens."""

    rows: Tensor  # [G] int64, which rows of the batch
    weights: Tensor  # [G, W] float64, in the order of token ids, 0 for tokens that were dropped
    token_ids: Tensor | None  # [G, W] int64, ascending; None if W = V, where a column is a token id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Knobs:
    """The metadata of G rows, as columns, and their largest logits."""

    temperature: Tensor  # [G, 1] in the logits' type
    top_k: Tensor  # [G, 1]
    top_p: Tensor  # [G, 1]
    min_p: Tensor | None  # [G, 1]
    largest: Tensor  # [G, 1]

    @classmethod
    def of(cls, logits: Tensor, metadata: SamplingMetadata, rows: Tensor) -> _Knobs:
        smallest = torch.finfo(logits.dtype).tiny  # a temperature that rounds to zero would give 0 / 0
        return cls(
            temperature=metadata.temperature[rows, None].to(logits.dtype).clamp_min(smallest),
            top_k=metadata.top_k[rows, None],
            top_p=metadata.top_p[rows, None],
            min_p=None if metadata.min_p is None else metadata.min_p[rows, None],
            largest=logits.amax(-1, keepdim=True),
        )

    def weigh(self, logits: Tensor) -> Tensor:
        # In place: at a vocabulary's width, fresh memory costs as much as the arithmetic.
        weights = (logits - self.largest).div_(self.temperature).exp_().double()
        if self.min_p is not None:
            weights.masked_fill_(weights < self.min_p, 0.0)  # the largest weight is 1
        return weights


def at_least_float32(logits: Tensor) -> Tensor:
    """Half-precision logits as float32; others as they are."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def sampled_candidates(logits: Tensor, metadata: SamplingMetadata) -> Iterator[Candidates]:
    """Distributions of the rows that are not greedy, in a few batches that together hold each of them once.

    Args:
        logits: [R, V].
        metadata: R rows.
    """
    for first in range(0, len(metadata.plain_rows), _PLAIN_ROWS):
        rows, chosen = _take(logits, metadata.plain_rows[first : first + _PLAIN_ROWS])
        yield Candidates(rows=rows, weights=_Knobs.of(chosen, metadata, rows).weigh(chosen), token_ids=None)
    if metadata.truncated_rows:
        yield from _truncated_candidates(*_take(logits, metadata.truncated_rows), metadata)


def target_probs(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """The distribution that each row's token is drawn from, [R, V] float64. Greedy rows are one-hot.

    Args:
        logits: [R, V].
        metadata: R rows.
    """
    probs = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    probs.scatter_(1, first_argmax(logits)[:, None], 1.0)
    for candidates in sampled_candidates(logits, metadata):
        total = candidates.weights.cumsum(-1)[:, -1:]
        drawn = candidates.weights / total
        if candidates.token_ids is not None:
            drawn = torch.zeros_like(probs[candidates.rows]).scatter_(1, candidates.token_ids, drawn)
        probs[candidates.rows] = drawn
    return probs


def _take(logits: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    return index, at_least_float32(logits if len(rows) == len(logits) else logits[index])


def _truncated_candidates(rows: Tensor, logits: Tensor, metadata: SamplingMetadata) -> Iterator[Candidates]:
    vocab_size = logits.shape[1]
    for width in _widths(metadata, vocab_size):
        knobs = _Knobs.of(logits, metadata, rows)
        mass = _whole_mass(logits, knobs) if metadata.any_top_p_alone else None
        if width == vocab_size:
            yield Candidates(rows=rows, weights=_truncate_sorted(logits, knobs, mass), token_ids=None)
            return
        candidates, is_exact = _truncate_largest(rows, logits, knobs, mass, width)
        if bool(is_exact.all()):
            yield candidates
            return
        yield Candidates(
            rows=rows[is_exact],
            weights=candidates.weights[is_exact],
            token_ids=None if candidates.token_ids is None else candidates.token_ids[is_exact],
        )
        rows, logits = rows[~is_exact], logits[~is_exact]


def _widths(metadata: SamplingMetadata, vocab_size: int) -> list[int]:
    """How many of the most likely tokens to look at, first and when that was not enough."""
    first = metadata.max_top_k + 1  # one more shows whether the last one that stays is tied with one that goes
    if metadata.any_top_p_alone:
        first = max(first, _FIRST_WIDTH)
    return sorted(
        {width for width in (first, _SECOND_WIDTH, vocab_size) if first <= width <= vocab_size} | {vocab_size}
    )


def _whole_mass(logits: Tensor, knobs: _Knobs) -> Tensor:
    """Sum of all weights of each row, in the order of token ids: [G, 1]."""
    return knobs.weigh(logits).cumsum(-1)[:, -1:]


def _kept(ranked: Tensor, knobs: _Knobs, mass: Tensor | None) -> Tensor:
    """Which tokens stay, a prefix of each row.

    Args:
        ranked: weights in the order of likelihood, [G, W].
        knobs: of the rows.
        mass: sum over all tokens, for rows without top_k, [G, 1].
    """
    ranks = torch.arange(ranked.shape[1], device=ranked.device)
    has_top_k = knobs.top_k > 0
    kept = ~has_top_k | (ranks < knobs.top_k)  # [G, W]
    cumulative = (ranked * kept).cumsum(-1)
    total = cumulative[:, -1:] if mass is None else torch.where(has_top_k, cumulative[:, -1:], mass)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))  # mass of strictly more likely tokens
    return kept & ((before < knobs.top_p * total) | (knobs.top_p >= 1.0))


def _truncate_sorted(logits: Tensor, knobs: _Knobs, mass: Tensor | None) -> Tensor:
    """Weights of all tokens, 0 for those that go: [G, V]."""
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    weights = knobs.weigh(logits)
    kept = _kept(weights.gather(1, order), knobs, mass)
    return weights * torch.zeros_like(kept).scatter_(1, order, kept)


def _truncate_largest(
    rows: Tensor, logits: Tensor, knobs: _Knobs, mass: Tensor | None, width: int
) -> tuple[Candidates, Tensor]:
    """As `_truncate_sorted`, from the largest logits alone; and for which rows [G] that was enough."""
    token_ids = torch.sort(logits.topk(width, sorted=False).indices, dim=-1).values  # [G, width]
    largest = logits.gather(1, token_ids)
    by_rank = torch.sort(largest, dim=-1, descending=True, stable=True)
    weights = knobs.weigh(largest)
    kept = _kept(weights.gather(1, by_rank.indices), knobs, mass)
    last_kept = by_rank.values.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_min(0)).squeeze(1)
    smallest = by_rank.values[:, -1]
    # Enough if the last one that stays beats the smallest one seen, and so all that were not seen; -inf has no weight
    # anyway; and a row that is not finite has no distribution at all.
    is_exact = (last_kept > smallest) | (smallest == -torch.inf) | ~knobs.largest.squeeze(1).isfinite()
    weights = weights * torch.zeros_like(kept).scatter_(1, by_rank.indices, kept)
    return Candidates(rows=rows, weights=weights, token_ids=token_ids), is_exact
