"""Which drafts a step verifies, given how likely each survives and what rows cost.

A step of N sequences that verifies the B likeliest drafts yields N + the sum of their survivals tokens, and takes the
time of its rows and of drafting. Survival only falls along a chain, so the B likeliest of all are a beginning of each
chain, and B is where tokens a second are highest (peagle.md 7, item 1). Owns this choice. Refuses to know where
survivals and costs come from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChoice:
    """How many drafts of each chain are verified, and what is expected of the step.

    Attributes:
        counts: drafts of each chain.
        tokens: that the step is expected to yield.
        seconds: that it is expected to take.
    """

    counts: list[int]
    tokens: float
    seconds: float


def choose_rows(
    chains: Sequence[Sequence[float]],
    *,
    num_other_rows: int,
    rows_s: Callable[[int], float],
    drafting_s: float,
) -> RowChoice:
    """The choice that promises the most tokens a second.

    Args:
        chains: survivals of each sequence's drafts, which never rise along a chain.
        num_other_rows: rows of the step beside the chains' and their known ones.
        rows_s: seconds of a pass by its number of rows.
        drafting_s: seconds of drafting, whatever is verified.
    """
    num_rows = len(chains) + num_other_rows
    counts = [0] * len(chains)
    tokens = float(len(chains))
    best = RowChoice(counts=list(counts), tokens=tokens, seconds=max(rows_s(num_rows) + drafting_s, 1e-9))
    # Next drafts by falling survival; each chain has one candidate at a time.
    candidates = [(-chain[0], index) for index, chain in enumerate(chains) if chain]
    heapq.heapify(candidates)
    while candidates:
        negative, index = heapq.heappop(candidates)
        tokens -= negative
        num_rows += 1
        counts[index] += 1
        if counts[index] < len(chains[index]):
            heapq.heappush(candidates, (-chains[index][counts[index]], index))
        seconds = max(rows_s(num_rows) + drafting_s, 1e-9)
        if tokens * best.seconds > best.tokens * seconds:
            best = RowChoice(counts=list(counts), tokens=tokens, seconds=seconds)
    return best
