"""How many drafts of each sequence a step verifies, and whether drafting pays at all.

Three policies behind one seam: always K, K by the number of decoding sequences (vLLM's table), and the load's own
choice: as many drafts as raise the expected tokens per second (peagle.md 7, item 1). A policy chooses speed and never
tokens. Owns the choice. Refuses to know blocks and budgets: the scheduler shortens what does not fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from peagle.scheduler.step_costs import CostCurve
from peagle.scheduler.survival import SurvivalModel
from peagle.spec_config import BatchSizeRange


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOffer:
    """Drafts of one decoding sequence that could be verified."""

    seq_id: int
    confidences: Sequence[float]

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
_HOPELESS = 0.98  # below which running sequences go on without it
_PROBE_EVERY = 16  # while it is not used, one sequence in so many is served with it, to notice when it would pay
_MIN_PROPOSALS = 50  # that are verified before the head is judged


class AdaptiveDepth:
    """As many drafts as raise the expected tokens per second.

    A step of N sequences that verifies the B likeliest drafts yields N + sum of their survivals tokens, and takes the
    time of its rows and of drafting. Survival only falls with depth, so the B likeliest of all are a beginning of each
    chain. Times are learned from the steps themselves.

    Args:
        num_speculative_tokens: K, most drafts of a sequence.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self.verify_cost = CostCurve()
        self.draft_cost = CostCurve()
        self.survival = SurvivalModel()
        self._num_proposals = 0
        self._probes: set[int] = set()

    def num_to_verify(self, offers: Sequence[DraftOffer], *, num_other_rows: int) -> list[int]:
        """The choice that promises the most tokens a second."""
        survivals = [self.survival.survivals(offer.seq_id, offer.confidences) for offer in offers]
        if not self.verify_cost.is_known:
            return [offer.num_drafts for offer in offers]
        base_rows = len(offers) + num_other_rows
        drafting_s = self.draft_cost.seconds(len(offers))
        counts = [0] * len(offers)
        best_counts = list(counts)
        tokens = float(len(offers))
        best_rate = tokens / max(self.verify_cost.seconds(base_rows) + drafting_s, 1e-9)
        # Next drafts by falling survival; each chain has one candidate at a time.
        candidates = [(-chain[0], index) for index, chain in enumerate(survivals) if chain]
        heapq.heapify(candidates)
        num_rows = base_rows
        while candidates:
            negative, index = heapq.heappop(candidates)
            tokens -= negative
            num_rows += 1
            counts[index] += 1
            if counts[index] < len(survivals[index]):
                heapq.heappush(candidates, (-survivals[index][counts[index]], index))
            rate = tokens / max(self.verify_cost.seconds(num_rows) + drafting_s, 1e-9)
            if rate > best_rate:
                best_rate, best_counts = rate, list(counts)
        return best_counts

    def num_to_propose(self, num_decoding: int) -> int:
        """K: how many of them are verified is decided when they are there."""
        return self._num_speculative_tokens

    def uses_head(self, seq_id: int, num_running: int) -> bool:
        """Whether the head pays with one more sequence running; now and then it is tried anyway."""
        if self.gain(num_running + 1) > _WORTHWHILE:
            return True
        if seq_id % _PROBE_EVERY == 0:
            self._probes.add(seq_id)
        return seq_id in self._probes

    def without_head(self, seq_ids: Sequence[int], num_decoding: int) -> list[int]:
        """All but the probes, if the head costs more than it brings at this load."""
        if not seq_ids or self.gain(max(num_decoding, 1)) >= _HOPELESS:
            return []
        return [seq_id for seq_id in seq_ids if seq_id not in self._probes]

    def gain(self, num_seqs: int) -> float:
        """Expected speedup of the head over none with `num_seqs` decoding, at the best K."""
        if self._num_proposals < _MIN_PROPOSALS or not self.verify_cost.is_known:
            return float("inf")  # nothing is known that speaks against it
        plain = self.verify_cost.seconds(num_seqs) / num_seqs
        best, tokens, reached = 0.0, 1.0, 1.0
        for depth, survival in enumerate(self.survival.mean, start=1):
            # Deep drafts are only verified where they are promising, so their mean flatters; none outlives its parent.
            reached = min(reached, survival)
            tokens += reached
            seconds = self.verify_cost.seconds(num_seqs * (depth + 1)) + self.draft_cost.seconds(num_seqs)
            best = max(best, num_seqs * tokens * plain / max(seconds, 1e-9))
        return best

    def observe(self, offer: DraftOffer, *, num_accepted: int) -> None:
        """Learn how far confidences can be trusted."""
        self._num_proposals += 1
        self.survival.observe(offer.seq_id, offer.confidences, num_accepted=num_accepted)

    def observe_step(self, report: StepReport) -> None:
        """Learn what rows cost."""
        self.verify_cost.observe(report.num_rows, report.verify_s)
        if report.num_drafting:
            self.draft_cost.observe(report.num_drafting, report.draft_s)

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's record."""
        self.survival.forget(seq_id)
        self._probes.discard(seq_id)
