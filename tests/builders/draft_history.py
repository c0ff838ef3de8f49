"""Sequences with random histories of prefill, acceptance, rejection and preemption, as a drafter sees them.

The target is played by random numbers: every committed token has a random feature, every rejected row a different one
that must leave no trace.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from peagle.drafter.interface import DraftBatch
from peagle.outputs import ScheduledSequence
from peagle.sampling_params import SamplingParams


@dataclass(kw_only=True, eq=False)
class DraftHistory:
    """One sequence: committed tokens, their features, and how far the drafter has come."""

    token_ids: list[int]
    features: Tensor  # [at least len(token_ids), feature_size]
    block_table: list[int]
    start: int = 0
    seq_id: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decoding(self) -> bool:
        return self.start == self.num_tokens - 1

    def preempt(self, block_table: Sequence[int]) -> None:
        """Everything is computed again, into other blocks."""
        self.start = 0
        self.block_table = list(block_table)

    def step(
        self, *, num_rows: int, num_drafts: int, max_next_drafts: int, max_depth: int | None = None
    ) -> HistoryStep:
        """Run up to `num_rows` known tokens, and `num_drafts` drafts if they reach the end: a chain, or a random tree
        of which at most `max_depth` drafts are accepted.
        """
        known = self.token_ids[self.start : self.start + num_rows]
        is_sampling = self.start + len(known) == self.num_tokens
        drafts = [self.rng.randrange(100) for _ in range(num_drafts if is_sampling else 0)]
        scheduled = ScheduledSequence(
            seq_id=self.seq_id,
            start=self.start,
            token_ids=known + drafts,
            num_draft_tokens=len(drafts),
            is_sampling=is_sampling,
            next_token_id=None if is_sampling else self.token_ids[self.start + len(known)],
            max_next_drafts=max_next_drafts if is_sampling else 0,
            block_table=[],
            drafter_block_table=self.block_table,
            params=SamplingParams(),
            seed=0,
        )
        path: list[int] = []
        if max_depth is None and is_sampling:
            path = list(range(self.rng.randint(0, len(drafts))))
        elif max_depth is not None and drafts:
            parents = [self.rng.randint(-1, node - 1) for node in range(len(drafts))]
            scheduled = replace(scheduled, draft_parents=parents)
            path = path_to(self.rng.randrange(-1, len(drafts)), parents)[:max_depth]
        emitted = [*(drafts[node] for node in path), self.rng.randrange(100)] if is_sampling else []
        valid_rows = [*range(len(known)), *(len(known) + node for node in path)]
        rows = torch.randn(len(scheduled.token_ids), self.features.shape[1], dtype=self.features.dtype) * 100
        rows[valid_rows] = self.features[self.start : self.start + len(valid_rows)]
        self.token_ids += emitted
        self.start += len(valid_rows)
        accepted_rows = None if max_depth is None else valid_rows[len(known) :]
        return HistoryStep(scheduled=scheduled, emitted=emitted, rows=rows, accepted_rows=accepted_rows)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from the root's child down to `node`; none to the root itself, -1."""
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@dataclass(frozen=True, kw_only=True, eq=False)
class HistoryStep:
    """One sequence's part of a batch."""

    scheduled: ScheduledSequence
    emitted: list[int]
    rows: Tensor
    accepted_rows: list[int] | None = None  # among `rows`; None for a chain


def draft_batch(steps: Sequence[HistoryStep], *, gap: int = 0) -> DraftBatch:
    """The steps as one batch, with `gap` rows of NaN after each sequence's rows, as a padded target pass has them."""
    parts, first_rows, num_rows = [], [], 0
    accepted_rows: dict[int, list[int]] = {}
    for step in steps:
        first_rows.append(num_rows)
        if step.accepted_rows is not None and step.emitted:
            accepted_rows[step.scheduled.seq_id] = [num_rows + row for row in step.accepted_rows]
        parts += [step.rows, torch.full((gap, step.rows.shape[1]), float("nan"), dtype=step.rows.dtype)]
        num_rows += len(step.rows) + gap
    return DraftBatch(
        scheduled=tuple(step.scheduled for step in steps),
        output_token_ids=[step.emitted for step in steps],
        features=torch.cat(parts),
        first_rows=first_rows,
        accepted_rows=accepted_rows,
    )
