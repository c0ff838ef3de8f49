"""The scheduler's side of speculation: how many drafts a step verifies and asks for, and who is served with the head.

Owns the limits that come from lengths and the token budget, and tells the policy what came of its choices. Refuses to
decide what pays (`depth_policy`), and to grant blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from peagle.outputs import MeasuredStep, ScheduledSequence, SchedulerOutput, SequenceOutput, StepTiming
from peagle.scheduler.depth_policy import DepthPolicy, DraftOffer, FixedDepth, StepReport
from peagle.scheduler.draft_budget import draft_allowance, shorten_drafts
from peagle.scheduler.step_plan import Grant
from peagle.sequence import Sequence


class Speculation:
    """Limits and policy of drafts.

    Args:
        num_speculative_tokens: most drafts of a sequence in a step; 0 is plain decoding.
        num_mask_slots: slots of the drafter that follow a sequence's rows when it drafts.
        has_head: there is a draft head at all.
        has_lookups: sequences without the head are drafted for too.
        policy: chooses how many drafts are verified.
    """

    def __init__(
        self,
        *,
        num_speculative_tokens: int = 0,
        num_mask_slots: int | None = None,
        has_head: bool = True,
        has_lookups: bool = False,
        policy: DepthPolicy | None = None,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.num_mask_slots = max(num_speculative_tokens - 1, 0) if num_mask_slots is None else num_mask_slots
        self._has_head = has_head and num_speculative_tokens > 0
        self._has_lookups = has_lookups
        self._policy: DepthPolicy = FixedDepth(num_speculative_tokens) if policy is None else policy

    def num_to_verify(self, decoding: SequenceOf[Sequence], *, room: int, prefill_demand: int) -> list[int]:
        """Drafts of each sequence that the step verifies: what fits, and of that what pays.

        Args:
            decoding: sequences with one known token to compute.
            room: token budget left once each has it.
            prefill_demand: known tokens of others that want to run.
        """
        if not self.num_speculative_tokens:
            return [0] * len(decoding)
        allowance = draft_allowance(room, prefill_demand=prefill_demand)
        wanted = [min(len(seq.draft_token_ids), self.longest_run(seq, seq.num_tokens)) for seq in decoding]
        fitting = shorten_drafts(wanted, allowance)
        offers = [
            DraftOffer(seq_id=seq.seq_id, confidences=_confidences(seq)[:num_drafts], uses_head=seq.uses_head)
            for seq, num_drafts in zip(decoding, fitting, strict=True)
        ]
        chosen = self._policy.num_to_verify(offers, num_other_rows=min(prefill_demand, room))
        # A tree's drafts are ordered by promise, not by depth: the policy's chains do not describe it. It stays whole.
        return [
            fits if seq.draft_parents is not None else min(fits, chooses)
            for seq, fits, chooses in zip(decoding, fitting, chosen, strict=True)
        ]

    def num_to_propose(self, seq: Sequence, num_tokens: int, *, num_decoding: int) -> int:
        """Drafts that are asked for, for a sequence that will know `num_tokens`."""
        if not self.num_speculative_tokens or not (seq.uses_head or self._has_lookups):
            return 0
        return min(self._policy.num_to_propose(num_decoding), self.longest_run(seq, num_tokens))

    def longest_run(self, seq: Sequence, num_tokens: int) -> int:
        """Drafts that `seq` can use once it knows `num_tokens`: a step yields one token beyond its accepted drafts."""
        return max(0, min(self.num_speculative_tokens, seq.max_num_tokens - num_tokens - 1))

    def num_lookahead_slots(self, grant: Grant, *, max_model_len: int) -> int:
        """The head's slots after a grant's rows: its mask slots if it drafts, none of them past the context."""
        if grant.max_next_drafts == 0 or not grant.seq.uses_head:
            return 0
        return max(0, min(self.num_mask_slots, max_model_len - grant.end - len(grant.draft_token_ids)))

    def uses_head(self, seq: Sequence, *, num_running: int) -> bool:
        """Whether a sequence that is admitted now is served with the draft head."""
        return self._has_head and self._policy.uses_head(seq.seq_id, num_running)

    def without_head(self, running: Iterable[Sequence], *, num_decoding: int) -> list[int]:
        """Running sequences that go on without it. There is no way back: their KV would have gaps."""
        with_head = [seq.seq_id for seq in running if seq.uses_head]
        return self._policy.without_head(with_head, num_decoding)

    def observe(self, step: SchedulerOutput, outputs: SequenceOf[SequenceOutput], timing: StepTiming | None) -> None:
        """Tell the policy what came of a step. Called before anything of it is committed."""
        for scheduled, output in zip(step.scheduled, outputs, strict=True):
            if scheduled.num_draft_tokens and output.error is None and scheduled.draft_parents is None:
                offer = DraftOffer(
                    seq_id=scheduled.seq_id,
                    confidences=scheduled.draft_confidences,
                    uses_head=scheduled.uses_head,
                )
                self._policy.observe(offer, num_accepted=output.num_accepted_tokens)
        if timing is not None and all(_is_decode(scheduled) for scheduled in step.scheduled):
            self._policy.observe_step(
                StepReport(
                    num_rows=step.num_scheduled_tokens,
                    num_drafting=sum(s.max_next_drafts > 0 and s.uses_head for s in step.scheduled),
                    verify_s=timing.verify_s,
                    draft_s=timing.draft_s,
                )
            )

    def note_cost(self, step: MeasuredStep) -> None:
        """Tell the policy what a step costs, before there is any load."""
        self._policy.observe_step(
            StepReport(
                num_rows=step.num_rows,
                num_drafting=step.num_seqs if step.is_drafting else 0,
                verify_s=step.timing.verify_s,
                draft_s=step.timing.draft_s,
            )
        )

    def forget(self, seq_id: int) -> None:
        """A sequence has ended."""
        self._policy.forget(seq_id)


def _is_decode(scheduled: ScheduledSequence) -> bool:
    return scheduled.is_sampling and scheduled.num_known_tokens == 1


def _confidences(seq: Sequence) -> list[float]:
    """The drafter's, or an even bet where it gave none."""
    return seq.draft_confidences or [0.5] * len(seq.draft_token_ids)
