"""Sequences with random histories of prefill, acceptance, rejection and preemption, as a drafter sees them.

The target is played by random numbers: every committed token has a random feature, every rejected row a different one
that must leave no trace.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    def step(self, *, num_rows: int, num_drafts: int, max_next_drafts: int) -> HistoryStep:
        """Run up to `num_rows` known tokens, and `num_drafts` drafts if they reach the end."""
        known = self.token_ids[self.start : self.start + num_rows]
        is_sampling = self.start + len(known) == self.num_tokens
        drafts = [self.rng.randrange(100) for _ in range(num_drafts if is_sampling else 0)]
        scheduled = ScheduledSequence(
            seq_id=0,
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
        emitted = []
        if is_sampling:
            emitted = [*drafts[: self.rng.randint(0, len(drafts))], self.rng.randrange(100)]
        num_valid = len(known) + max(0, len(emitted) - 1)
        rows = torch.randn(len(scheduled.token_ids), self.features.shape[1], dtype=self.features.dtype) * 100
        rows[:num_valid] = self.features[self.start : self.start + num_valid]
        self.token_ids += emitted
        self.start += num_valid
        return HistoryStep(scheduled=scheduled, emitted=emitted, rows=rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class HistoryStep:
    """One sequence's part of a batch."""

    scheduled: ScheduledSequence
    emitted: list[int]
    rows: Tensor


def draft_batch(steps: Sequence[HistoryStep], *, gap: int = 0) -> DraftBatch:
    """The steps as one batch, with `gap` rows of NaN after each sequence's rows, as a padded target pass has them."""
    parts, first_rows, num_rows = [], [], 0
    for step in steps:
        first_rows.append(num_rows)
        parts += [step.rows, torch.full((gap, step.rows.shape[1]), float("nan"), dtype=step.rows.dtype)]
        num_rows += len(step.rows) + gap
    return DraftBatch(
        scheduled=tuple(step.scheduled for step in steps),
        output_token_ids=[step.emitted for step in steps],
        features=torch.cat(parts),
        first_rows=first_rows,
    )
