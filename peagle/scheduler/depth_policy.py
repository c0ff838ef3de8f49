"""How many drafts of each sequence a step verifies, and whether drafting pays at all.

Three policies behind one seam: always K, K by the number of decoding sequences (vLLM's table), and the load's own
choice: as many drafts as raise the expected tokens per second (peagle.md 7, item 1). A policy chooses speed and never
tokens. Owns the choice. Refuses to know blocks and budgets: the scheduler shortens what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from peagle.scheduler.head_gain import HeadGain
from peagle.scheduler.row_choice import choose_rows
from peagle.scheduler.step_costs import CostCurve
from peagle.scheduler.survival import SurvivalModel
from peagle.spec_config import BatchSizeRange


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOffer:
    """Drafts of one decoding sequence that could be verified.

    Attributes:
        confidences: of each draft, given that its parent is accepted.
        uses_head: the sequence is served with the head, whoever made these drafts.
    """

    seq_id: int
    confidences: Sequence[float]
    uses_head: bool = True

    @property
    def num_drafts(self) -> int:
        """How many there are."""
        return len(self.confidences)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step of decodes alone showed."""

    num_rows: int  # of the target
    num_drafting: int  # sequences that were drafted for
    verify_s: float
    draft_s: float


class DepthPolicy(Protocol):
    """Decides for the scheduler."""

    def num_to_verify(self, offers: Sequence[DraftOffer], *, num_other_rows: int) -> list[int]:
        """How many drafts of each offer to verify, beside its one known row and `num_other_rows` of prefill."""
        ...

    def num_to_propose(self, num_decoding: int) -> int:
        """Most drafts that are worth proposing for the next step; 0: the drafter only keeps up."""
        ...

    def uses_head(self, seq_id: int, num_running: int) -> bool:
        """Whether a sequence that is admitted beside `num_running` others is served with the draft head."""
        ...

    def without_head(self, seq_ids: Sequence[int], num_decoding: int) -> list[int]:
        """Those of the running sequences that are better served without the head from now on."""
        ...

    def observe(self, offer: DraftOffer, *, num_accepted: int) -> None:
        """A sequence's first `offer.num_drafts` drafts were verified."""
        ...

    def observe_step(self, report: StepReport) -> None:
        """A step without prefill has run."""
        ...

    def forget(self, seq_id: int) -> None:
        """A sequence has ended."""
        ...


class FixedDepth:
    """Always K."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    def num_to_verify(self, offers: Sequence[DraftOffer], *, num_other_rows: int) -> list[int]:
        """All of them."""
        return [offer.num_drafts for offer in offers]

    def num_to_propose(self, num_decoding: int) -> int:
        """K."""
        return self._num_speculative_tokens

    def uses_head(self, seq_id: int, num_running: int) -> bool:
        """Always."""
        return True

    def without_head(self, seq_ids: Sequence[int], num_decoding: int) -> list[int]:
        """None."""
        return []

    def observe(self, offer: DraftOffer, *, num_accepted: int) -> None:
        """Nothing is learned."""

    def observe_step(self, report: StepReport) -> None:
        """Nothing is learned."""

    def forget(self, seq_id: int) -> None:
        """Nothing is kept."""


class DepthByBatchSize(FixedDepth):
    """K by the number of decoding sequences; beyond the table its last row counts."""

    def __init__(self, table: Sequence[BatchSizeRange]) -> None:
        super().__init__(max(row.num_speculative_tokens for row in table))
        self._table = tuple(table)

    def num_to_verify(self, offers: Sequence[DraftOffer], *, num_other_rows: int) -> list[int]:
        """At most the table's K for as many offers."""
        depth = self.num_to_propose(len(offers))
        return [min(offer.num_drafts, depth) for offer in offers]

    def num_to_propose(self, num_decoding: int) -> int:
        """The table's K."""
        for row in self._table:
            if num_decoding <= row.last:
                return row.num_speculative_tokens
        return self._table[-1].num_speculative_tokens


_WORTHWHILE = 1.02  # speedup that the head must promise to be used, and
_HOPELESS = 0.96  # below which running sequences go on without it: there is no way back, and estimates are noisy
# While it is not used, some sequences are served with it, the probes, to notice when it would pay: so many that they
# cost this share of the time, and one in four at most. All that decode beside a probe wait for its drafts.
_PROBE_COST = 0.01
_MOST_PROBES = 0.25
_PROBE_PROPOSALS = 64  # after which a probe goes on like the others


class AdaptiveDepth:
    """As many drafts as raise the expected tokens per second (`row_choice`), and the head where it pays (`head_gain`).

    Times are learned from the steps themselves.

    Args:
        num_speculative_tokens: K, most drafts of a sequence.
        expected: see `HeadGain`.
    """

    def __init__(self, num_speculative_tokens: int, expected: Sequence[float] = ()) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self.verify_cost = CostCurve()
        self.draft_cost = CostCurve()
        self.survival = SurvivalModel()
        self._gain = HeadGain(self.verify_cost, self.draft_cost, expected[:num_speculative_tokens])
        self._probes: dict[int, int] = {}  # proposals that are left to each

    def num_to_verify(self, offers: Sequence[DraftOffer], *, num_other_rows: int) -> list[int]:
        """The choice that promises the most tokens a second."""
        chains = [
            self.survival.survivals(offer.seq_id, offer.confidences, uses_head=offer.uses_head) for offer in offers
        ]
        for offer, chain in zip(offers, chains, strict=True):
            if offer.uses_head and chain:
                self._gain.observe(chain)
                if offer.seq_id in self._probes:
                    self._probes[offer.seq_id] -= 1
        if not self.verify_cost.is_known:
            return [offer.num_drafts for offer in offers]
        counts = choose_rows(
            chains,
            num_other_rows=num_other_rows,
            rows_s=self.verify_cost.seconds,
            drafting_s=self.draft_cost.seconds(sum(offer.uses_head for offer in offers)),
        ).counts
        # A probe that verified nothing would learn nothing.
        return [
            max(count, int(offer.seq_id in self._probes and offer.num_drafts > 0))
            for offer, count in zip(offers, counts, strict=True)
        ]

    def num_to_propose(self, num_decoding: int) -> int:
        """K: how many of them are verified is decided when they are there."""
        return self._num_speculative_tokens

    def uses_head(self, seq_id: int, num_running: int) -> bool:
        """Whether the head pays with one more sequence running; now and then it is tried anyway."""
        gain = self.gain(num_running + 1)
        if gain > _WORTHWHILE:
            return True
        share = min(_PROBE_COST / max(1.0 - gain, 0.01), _MOST_PROBES) / (num_running + 1)
        if seq_id % round(1 / share) == 0:
            self._probes[seq_id] = _PROBE_PROPOSALS
        return seq_id in self._probes

    def without_head(self, seq_ids: Sequence[int], num_decoding: int) -> list[int]:
        """All but the probes, if the head costs more than it brings at this load."""
        if not seq_ids or self.gain(max(num_decoding, 1)) >= _HOPELESS:
            return []
        return [seq_id for seq_id in seq_ids if self._probes.get(seq_id, 0) <= 0]

    def gain(self, num_seqs: int) -> float:
        """Expected speedup of the head over none with `num_seqs` decoding."""
        return self._gain.at(num_seqs)

    def observe(self, offer: DraftOffer, *, num_accepted: int) -> None:
        """Learn how far confidences can be trusted."""
        self.survival.observe(offer.seq_id, offer.confidences, num_accepted=num_accepted, uses_head=offer.uses_head)

    def observe_step(self, report: StepReport) -> None:
        """Learn what rows cost."""
        self.verify_cost.observe(report.num_rows, report.verify_s)
        if report.num_drafting:
            self.draft_cost.observe(report.num_drafting, report.draft_s)

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's record."""
        self.survival.forget(seq_id)
        self._probes.pop(seq_id, None)
