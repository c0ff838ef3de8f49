"""The step under construction: what has been granted to whom, and the budget that is left.

Owns the arithmetic of one step and its translation to `SchedulerOutput`. Refuses to decide who gets something.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from peagle.kv_cache import KVCacheManager
from peagle.outputs import ScheduledSequence, SchedulerOutput
from peagle.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Rows that one sequence computes: known tokens from `num_computed_tokens` on, then drafts."""

    seq: Sequence
    num_known_tokens: int
    draft_token_ids: SequenceOf[int] = ()
    draft_parents: SequenceOf[int] | None = None
    draft_confidences: SequenceOf[float] = ()
    max_next_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows, as they count in the budget."""
        return self.num_known_tokens + len(self.draft_token_ids)

    @property
    def end(self) -> int:
        """Position after the last known row."""
        return self.seq.num_computed_tokens + self.num_known_tokens

    @property
    def is_sampling(self) -> bool:
        """True if the last known row is the last known token of the sequence."""
        return self.end == self.seq.num_tokens

    def to_scheduled(self, kv: KVCacheManager) -> ScheduledSequence:
        """What the runner gets; block tables are copied, so later steps do not change it."""
        seq, end = self.seq, self.end
        return ScheduledSequence(
            seq_id=seq.seq_id,
            start=seq.num_computed_tokens,
            token_ids=[*seq.token_ids[seq.num_computed_tokens : end], *self.draft_token_ids],
            num_draft_tokens=len(self.draft_token_ids),
            is_sampling=self.is_sampling,
            # Of prompt and output together: a resumed sequence recomputes output tokens too.
            next_token_id=None if self.is_sampling else seq.token_ids[end],
            max_next_drafts=self.max_next_drafts if self.is_sampling else 0,
            block_table=kv.block_table(seq.seq_id),
            drafter_block_table=kv.drafter_block_table(seq.seq_id),
            params=seq.params,
            seed=seq.seed,
            draft_parents=self.draft_parents,
            draft_confidences=self.draft_confidences,
            known_token_ids=seq.token_ids,
            num_prompt_tokens=seq.num_prompt_tokens,
            predicted_token_ids=seq.predicted_token_ids,
            uses_head=seq.uses_head,
            eos_token_ids=frozenset() if seq.params.ignore_eos else seq.eos_token_ids,
        )


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """A step being planned.

    Attributes:
        budget_left: tokens that can still be granted.
        grants: what has been granted, in order.
        preempted_seq_ids: sequences that lost their blocks to this step.
        is_short_of_blocks: some running sequence had to wait or give way, so nobody new may take blocks.
    """

    budget_left: int
    grants: list[Grant] = field(default_factory=list)
    preempted_seq_ids: list[int] = field(default_factory=list)
    is_short_of_blocks: bool = False

    def add(self, grant: Grant) -> None:
        """Grant rows within the budget."""
        assert 0 < grant.num_tokens <= self.budget_left
        self.budget_left -= grant.num_tokens
        self.grants.append(grant)

    def to_output(self, kv: KVCacheManager, *, num_speculative_tokens: int) -> SchedulerOutput:
        """The finished step: first sequences that sample from at most K + 1 rows, then longer last chunks of prefills,
        then chunks that do not sample.
        """

        def rank(grant: Grant) -> tuple[bool, bool]:
            return (not grant.is_sampling, grant.num_tokens > num_speculative_tokens + 1)

        return SchedulerOutput(
            scheduled=tuple(grant.to_scheduled(kv) for grant in sorted(self.grants, key=rank)),
            num_scheduled_tokens=sum(grant.num_tokens for grant in self.grants),
            preempted_seq_ids=tuple(self.preempted_seq_ids),
        )
