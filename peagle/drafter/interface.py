"""The seam between the runner and whatever proposes drafts.

Owns the hand-offs: what a drafter gets of a verified step, and what it gives back. Refuses to know how drafts are
made, and never writes to a sequence: drafts are proposals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from peagle.outputs import ScheduledSequence

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftBatch:
    """A verified step. Filled by the runner."""

    scheduled: tuple[ScheduledSequence, ...]
    output_token_ids: Sequence[Sequence[int]]  # accepted drafts, then the newest token; empty for a chunk or a failure
    features: Tensor  # [num_rows, n_aux * H_t], auxiliary hidden states of the target's rows
    first_rows: Sequence[int]  # where each sequence's rows begin in `features`
    # By seq id, where the accepted drafts' rows are in `features`. Left out: right behind the sequence's known rows.
    accepted_rows: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftProposal:
    """What a drafter proposes for the next step."""

    indices: tuple[int, ...]  # which entries of `scheduled` have drafts, ascending
    draft_token_ids: Tensor  # [len(indices), at most K] int64 on the device; -1 where none was asked for
    confidences: Tensor | None = None  # as wide, the drafter's estimate that a draft is accepted
    parents: tuple[tuple[int, ...], ...] | None = None  # for each index, of each draft its parent; None: chains
    draft_probs: Tensor | None = None  # [len(indices), as wide, V], what each was drawn from, 0 if not drawn


class Drafter(Protocol):
    """Proposes drafts, and keeps what it needs of the committed tokens between steps."""

    @property
    def num_speculative_tokens(self) -> int:
        """K, the most drafts of a sequence and step."""
        ...

    @property
    def num_mask_slots(self) -> int:
        """Slots behind a sequence's rows that drafting writes to."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values; 0 if nothing is kept and block tables are empty."""
        ...

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Target layers before which the residual stream is tapped, ascending; empty if no features are read."""
        ...

    def propose(self, batch: DraftBatch) -> DraftProposal:
        """Take in every committed token of the step, and draft for the sequences with `max_next_drafts` > 0."""
        ...
