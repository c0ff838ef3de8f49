"""The scheduler: which tokens of which sequences run in a step, and what the step's result changes.

Owns the lives of sequences between arrival and end, and is the only writer of `Sequence`. Refuses to know text,
threads, clocks and tensors. `schedule` and `update_from_output` alternate; every other method may be called in between.

There are no phases. A running sequence wants `num_tokens + drafts - num_computed_tokens` rows, and each step grants
some of them within one token budget:

1. Every *decoding* sequence (one known token left to compute) gets that token. `max_num_batched_tokens >= max_num_seqs`
   makes this always possible, so a long prompt never stops others' decoding.
2. Drafts get what `draft_budget` allows beside waiting prefill work, so decoding never stops a prefill either.
3. Prefills get the rest as chunks, in policy order; then new sequences are admitted, in policy order, without skipping.

Blocks: a sequence gets the blocks of all its known tokens when it is admitted, so only decoding can run short. Then the
sequence first goes without drafts; next, the running sequence that is last in policy order is preempted (its KV is
recomputed later); the last one itself waits for a step. The first in policy order can therefore always go on, and the
pool holds `max_model_len` tokens, so every sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from peagle.config import SchedulerConfig
from peagle.errors import ConfigError, ContextLengthError, EngineOverloadedError, IntegrityError
from peagle.kv_cache import KVCacheManager, PrefixMatch
from peagle.outputs import (
    ModelRunnerOutput,
    ScheduledSequence,
    SchedulerOutput,
    SequenceCommit,
    SequenceOutput,
)
from peagle.scheduler.commit import check_output, cut_at_end
from peagle.scheduler.integrity import check_running, check_waiting
from peagle.scheduler.policy import order_key
from peagle.scheduler.queues import WaitingQueue
from peagle.scheduler.speculation import Speculation
from peagle.scheduler.step_plan import Grant, StepPlan
from peagle.sequence import FinishReason, Sequence, SequenceStatus


class Scheduler:
    """Continuous batching under one token budget.

    Args:
        config: limits and policy.
        kv: the block pools.
        max_model_len: longest sequence in tokens.
        speculation: limits and policy of drafts; None is plain decoding.

    Raises:
        ConfigError: the pools cannot hold one sequence of `max_model_len` tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        speculation: Speculation | None = None,
    ) -> None:
        if kv.max_num_slots < max_model_len:
            raise ConfigError(
                f"the KV cache holds {kv.max_num_slots} tokens, but max_model_len is {max_model_len}: "
                "give the cache more blocks or memory, or lower max_model_len"
            )
        self._config = config
        self._kv = kv
        self._max_model_len = max_model_len
        self._speculation = speculation or Speculation()
        self._num_decoding = 0
        self._order_key = order_key(config.scheduling_policy)
        self._waiting = WaitingQueue(self._order_key)
        self._running: dict[int, Sequence] = {}
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Admitted sequences."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission, preempted ones included."""
        return len(self._waiting)

    @property
    def num_with_head(self) -> int:
        """Admitted sequences that the draft head drafts for."""
        return sum(seq.uses_head for seq in self._running.values())

    @property
    def has_work(self) -> bool:
        """True if `schedule` would return something to run."""
        return bool(self._running) or len(self._waiting) > 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ContextLengthError: no room for an answer, or a length limit beyond the context.
            EngineOverloadedError: the queue is full.
        """
        if not 0 < seq.num_tokens < seq.max_num_tokens <= self._max_model_len:
            raise ContextLengthError(
                f"a prompt of {seq.num_tokens} tokens with a limit of {seq.max_num_tokens} in all does not fit "
                f"the context of {self._max_model_len} tokens, which must also hold an answer"
            )
        if len(self._waiting) >= self._config.max_num_queued_reqs:
            raise EngineOverloadedError(f"{len(self._waiting)} requests are waiting already; try again later")
        assert seq.status is SequenceStatus.WAITING
        assert seq.seq_id not in self._running
        self._waiting.push(seq)

    def abort(self, seq_id: int) -> bool:
        """End a sequence because its client is gone. As `finish`."""
        return self.finish(seq_id, FinishReason.ABORT)

    def finish(self, seq_id: int, reason: FinishReason) -> bool:
        """End a sequence and free its blocks at once; False if it has ended already or is unknown."""
        seq = self._running.pop(seq_id, None) or self._waiting.remove(seq_id)
        if seq is None:
            return False
        self._kv.free(seq_id)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.drop_drafts()
        self._speculation.forget(seq_id)
        return True

    def fail(self, seq_ids: Iterable[int]) -> None:
        """End sequences whose step raised. Nothing of that step was published, so no other sequence is touched."""
        for seq_id in seq_ids:
            self.finish(seq_id, FinishReason.ERROR)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Empty only if there is no work."""
        plan = StepPlan(budget_left=self._config.token_budget)
        ordered = sorted(self._running.values(), key=self._order_key)
        decoding = [seq for seq in ordered if _is_decoding(seq)]
        self._num_decoding = len(decoding)
        self._give_up_heads()
        self._grant_decodes(plan, decoding)
        self._grant_prefills(plan, [seq for seq in ordered if not _is_decoding(seq)])
        if not plan.is_short_of_blocks:
            self._admit(plan)
        return plan.to_output(self._kv, num_speculative_tokens=self._speculation.num_speculative_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[SequenceCommit]:
        """Commit a step: append tokens, advance counters, publish blocks, end what has ended.

        Returns:
            One commit per sequence that sampled, in the order of `scheduled`. Chunks commit no token and are left out
            unless they bring log probabilities of the prompt; so are sequences that ended while the step ran.
        """
        assert len(scheduler_output.scheduled) == len(runner_output.outputs)
        pairs = list(zip(scheduler_output.scheduled, runner_output.outputs, strict=True))
        for scheduled, output in pairs:
            if output.error is None:
                check_output(scheduled, output)
        self._speculation.observe(scheduler_output, runner_output.outputs, runner_output.timing)
        commits = []
        for scheduled, output in pairs:
            seq = self._running.get(scheduled.seq_id)
            if seq is None or output.error is not None:
                continue
            if scheduled.is_sampling:
                commits.append(self._commit_sampled(seq, scheduled, output))
            else:
                seq.num_computed_tokens = scheduled.start + scheduled.num_known_tokens
                self._kv.publish(seq)
                if output.prompt_logprobs:
                    commits.append(_chunk_commit(seq, scheduled, output))
        return commits

    def check_integrity(self) -> None:
        """Compare queues, sequences and block pools with one another; callable between steps.

        Raises:
            IntegrityError: with the first contradiction found.
        """
        if len(self._running) > self._config.max_num_seqs:
            raise IntegrityError(f"{len(self._running)} sequences run, more than {self._config.max_num_seqs}")
        check_running(self._running, self._kv)
        check_waiting(self._waiting)

    def _grant_decodes(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        room = plan.budget_left - len(decoding)
        chosen = self._speculation.num_to_verify(decoding, room=room, prefill_demand=self._prefill_demand())
        for seq, num_drafts in zip(decoding, chosen, strict=True):
            if seq.status is SequenceStatus.RUNNING:  # not preempted for the sake of an earlier one
                self._grant_decode(plan, seq, num_drafts)

    def _grant_decode(self, plan: StepPlan, seq: Sequence, num_drafts: int) -> None:
        full = Grant(
            seq=seq,
            num_known_tokens=1,
            draft_token_ids=seq.draft_token_ids[:num_drafts],
            draft_parents=None if seq.draft_parents is None else seq.draft_parents[:num_drafts],
            draft_confidences=seq.draft_confidences[:num_drafts],
            max_next_drafts=self._num_to_propose(seq),
        )
        bare = Grant(seq=seq, num_known_tokens=1)
        while True:
            for grant in (full, bare):
                if self._kv.allocate_slots(
                    seq, num_new_tokens=grant.num_tokens, num_lookahead_slots=self._num_mask_slots(grant)
                ):
                    plan.add(grant)
                    return
            plan.is_short_of_blocks = True
            victim = max(self._running.values(), key=self._order_key)
            if victim is seq:
                assert len(self._running) > 1, "the pools hold any one sequence"
                return
            self._preempt(victim)
            plan.preempted_seq_ids.append(victim.seq_id)

    def _grant_prefills(self, plan: StepPlan, prefilling: list[Sequence]) -> None:
        for seq in prefilling:
            if plan.budget_left == 0:
                return
            if seq.status is SequenceStatus.RUNNING:
                self._grant_prefill(plan, seq)

    def _grant_prefill(self, plan: StepPlan, seq: Sequence) -> None:
        num_known = min(seq.num_tokens - seq.num_computed_tokens, plan.budget_left)
        plan.add(Grant(seq=seq, num_known_tokens=num_known, max_next_drafts=self._num_to_propose(seq)))

    def _admit(self, plan: StepPlan) -> None:
        while plan.budget_left > 0 and self._can_admit():
            seq = self._waiting.peek()
            # Those behind it come in with it: a burst must not pay for the head's prefill, and then go on without it.
            beside = min(len(self._running) + len(self._waiting) - 1, self._config.max_num_seqs - 1)
            seq.uses_head = self._speculation.uses_head(seq, num_running=beside)
            prefix = self._match_prefix(seq)
            rest = Grant(
                seq=seq,
                num_known_tokens=seq.num_tokens,
                max_next_drafts=self._num_to_propose(seq),
            )
            if not self._kv.allocate_slots(
                seq,
                num_new_tokens=seq.num_tokens - prefix.num_tokens,
                num_lookahead_slots=self._num_mask_slots(rest),
                prefix=prefix,
                # A block for each running sequence, or the newcomer would be preempted within a few steps.
                num_spare_blocks=len(self._running),
            ):
                return
            self._waiting.pop()
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = prefix.num_tokens
                self._kv.count_lookup(seq, prefix)
            seq.status = SequenceStatus.RUNNING
            seq.num_computed_tokens = prefix.num_tokens
            self._running[seq.seq_id] = seq
            self._grant_prefill(plan, seq)

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq.seq_id]
        self._kv.free(seq.seq_id)
        seq.status = SequenceStatus.PREEMPTED
        seq.num_computed_tokens = 0
        seq.drop_drafts()
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(seq)

    def _commit_sampled(self, seq: Sequence, scheduled: ScheduledSequence, output: SequenceOutput) -> SequenceCommit:
        cut = cut_at_end(seq, output.token_ids)
        num_valid = scheduled.start + scheduled.num_known_tokens + output.num_accepted_tokens
        seq.token_ids.extend(cut.token_ids)
        # An answer may end inside the accepted run: rows past its end are valid KV of tokens that were never said.
        seq.num_computed_tokens = min(num_valid, seq.num_tokens)
        self._take_drafts(seq, output, scheduled.max_next_drafts)
        self._kv.publish(seq)
        if cut.finish_reason is not None:
            self.finish(seq.seq_id, cut.finish_reason)
        return SequenceCommit(
            seq_id=seq.seq_id,
            request_id=seq.request_id,
            new_token_ids=cut.token_ids,
            finish_reason=cut.finish_reason,
            num_draft_tokens=scheduled.num_draft_tokens,
            num_accepted_tokens=min(output.num_accepted_tokens, len(cut.token_ids)),
            draft_parents=scheduled.draft_parents,
            logprobs=output.logprobs[: len(cut.token_ids)],
            prompt_logprobs=output.prompt_logprobs,
            prompt_logprobs_start=scheduled.start + 1,
        )

    def _match_prefix(self, seq: Sequence) -> PrefixMatch:
        """What the cache holds of a sequence. Nothing, if every row of its prompt is wanted."""
        return PrefixMatch() if seq.params.prompt_logprobs is not None else self._kv.match_prefix(seq)

    def _can_admit(self) -> bool:
        return len(self._waiting) > 0 and len(self._running) < self._config.max_num_seqs

    def _prefill_demand(self) -> int:
        demand = sum(
            seq.num_tokens - seq.num_computed_tokens for seq in self._running.values() if not _is_decoding(seq)
        )
        return demand + (self._waiting.peek().num_tokens if self._can_admit() else 0)

    def _give_up_heads(self) -> None:
        """Go on without the draft head where it costs more than it brings."""
        for seq_id in self._speculation.without_head(self._running.values(), num_decoding=self._num_decoding):
            seq = self._running[seq_id]
            seq.uses_head = False
            seq.drop_drafts()
            self._kv.free_drafter(seq_id)

    def _take_drafts(self, seq: Sequence, output: SequenceOutput, most: int) -> None:
        seq.draft_token_ids = list(output.draft_token_ids[:most])
        seq.draft_parents = None if output.draft_parents is None else list(output.draft_parents[:most])
        seq.draft_confidences = list(output.draft_confidences[:most])

    def _num_to_propose(self, seq: Sequence) -> int:
        return self._speculation.num_to_propose(seq, seq.num_tokens + 1, num_decoding=max(self._num_decoding, 1))

    def _num_mask_slots(self, grant: Grant) -> int:
        return self._speculation.num_lookahead_slots(grant, max_model_len=self._max_model_len)


def _chunk_commit(seq: Sequence, scheduled: ScheduledSequence, output: SequenceOutput) -> SequenceCommit:
    return SequenceCommit(
        seq_id=seq.seq_id,
        request_id=seq.request_id,
        new_token_ids=(),
        finish_reason=None,
        prompt_logprobs=output.prompt_logprobs,
        prompt_logprobs_start=scheduled.start + 1,
    )


def _is_decoding(seq: Sequence) -> bool:
    return seq.num_tokens - seq.num_computed_tokens == 1
