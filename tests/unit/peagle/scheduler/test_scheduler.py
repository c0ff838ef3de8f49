from __future__ import annotations

import pytest

from peagle.config import SchedulerConfig
from peagle.errors import ConfigError, ContextLengthError, EngineOverloadedError, IntegrityError
from peagle.outputs import ModelRunnerOutput, ScheduledSequence, SequenceCommit, SequenceOutput
from peagle.sampling_params import SamplingParams
from peagle.scheduler import Scheduler
from peagle.scheduler.depth_policy import FixedDepth
from peagle.scheduler.speculation import Speculation
from peagle.sequence import FinishReason, Sequence, SequenceStatus
from tests.builders.paged_runner import PagedRunner
from tests.builders.scheduler import make_kv, make_scheduler, make_sequence


def step(scheduler: Scheduler, runner: PagedRunner) -> list[SequenceCommit]:
    output = scheduler.schedule()
    return scheduler.update_from_output(output, runner.run(output))


def add(scheduler: Scheduler, *seqs: Sequence) -> list[Sequence]:
    for seq in seqs:
        scheduler.add(seq)
    return list(seqs)


def rows(scheduled: ScheduledSequence) -> tuple[int, list[int], int, int | None]:
    return scheduled.start, list(scheduled.token_ids), scheduled.num_draft_tokens, scheduled.next_token_id


def test_a_pool_smaller_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 60 tokens, but max_model_len is 61"):
        make_scheduler(kv=make_kv(num_blocks=20, num_drafter_blocks=15), max_model_len=61)


@pytest.mark.parametrize("prompt_len", [0, 60, 64, 70])
def test_a_sequence_beyond_the_context_is_refused(prompt_len: int) -> None:
    with pytest.raises(ContextLengthError, match="context of 64 tokens"):
        make_scheduler(max_model_len=64).add(make_sequence(0, range(prompt_len), max_tokens=8 if prompt_len else 0))


def test_a_full_queue_refuses() -> None:
    scheduler = make_scheduler(max_num_queued_reqs=2)
    add(scheduler, make_sequence(0), make_sequence(1))
    with pytest.raises(EngineOverloadedError, match="2 requests are waiting"):
        scheduler.add(make_sequence(2))
    scheduler.schedule()
    scheduler.add(make_sequence(2))


def test_chunks_carry_the_next_known_token() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=8, max_num_seqs=2), PagedRunner()
    scheduler.add(make_sequence(0, range(100, 120)))
    chunks = []
    for _ in range(3):
        output = scheduler.schedule()
        chunks += [rows(s) for s in output.scheduled]
        scheduler.update_from_output(output, runner.run(output))
    assert chunks == [
        (0, [*range(100, 108)], 0, 108),
        (8, [*range(108, 116)], 0, 116),
        (16, [*range(116, 120)], 0, None),
    ]


def test_a_resumed_sequence_takes_its_next_token_from_prompt_and_output() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=8, max_num_seqs=2), PagedRunner()
    (seq,) = add(scheduler, make_sequence(0, range(6), max_tokens=20))
    while seq.num_output_tokens < 6:
        step(scheduler, runner)
    scheduler._preempt(seq)
    scheduler.check_integrity()
    assert (seq.status, scheduler.num_waiting) == (SequenceStatus.PREEMPTED, 1)
    output = scheduler.schedule()
    (scheduled,) = output.scheduled
    assert scheduled.start == 8, "two blocks of prompt and output are still cached"
    assert seq.num_cached_tokens == 0, "counted when first scheduled, not when resumed"
    end = scheduled.start + len(scheduled.token_ids)
    assert scheduled.token_ids == seq.token_ids[8:end]
    assert scheduled.next_token_id == (None if end == seq.num_tokens else seq.token_ids[end])


def test_drafts_never_reach_past_the_length_limit() -> None:
    scheduler = make_scheduler(num_speculative_tokens=5)
    runner = PagedRunner(num_speculative_tokens=5, percent_right=100)
    (seq,) = add(scheduler, make_sequence(0, range(4), max_tokens=9))
    seen = []
    while scheduler.has_work:
        output = scheduler.schedule()
        (scheduled,) = output.scheduled
        seen.append((scheduled.num_draft_tokens, scheduled.max_next_drafts))
        scheduler.update_from_output(output, runner.run(output))
    assert seen == [(0, 5), (5, 5), (1, 0)]
    assert (seq.num_output_tokens, seq.finish_reason) == (9, FinishReason.LENGTH)


def test_mask_slots_stay_inside_the_context() -> None:
    kv = make_kv(num_blocks=4)
    scheduler = make_scheduler(kv=kv, max_model_len=16, num_speculative_tokens=7)
    scheduler.add(make_sequence(0, range(12), max_tokens=4))
    output = scheduler.schedule()
    assert (len(output.scheduled[0].block_table), len(output.scheduled[0].drafter_block_table)) == (3, 4)


def test_a_stop_inside_the_accepted_run_cuts_tokens_and_progress() -> None:
    runner = PagedRunner(percent_right=100)
    said = runner.generate(range(4), seed=0, num_tokens=4)
    scheduler = make_scheduler()
    stop = SamplingParams(stop_token_ids=frozenset({said[2]}))
    (seq,) = add(scheduler, make_sequence(0, range(4), params=stop))
    step(scheduler, runner)
    (commit,) = step(scheduler, runner)
    assert list(commit.new_token_ids) == said[1:3]
    assert (commit.num_draft_tokens, commit.num_accepted_tokens) == (3, 2)
    assert (commit.finish_reason, seq.finish_reason) == (FinishReason.STOP, FinishReason.STOP)
    assert (seq.num_tokens, seq.num_computed_tokens, seq.draft_token_ids) == (7, 7, [])
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_finish_frees_at_once_and_is_idempotent() -> None:
    kv = make_kv()
    scheduler = make_scheduler(kv=kv, max_num_seqs=1)
    running, waiting = add(scheduler, make_sequence(0), make_sequence(1))
    scheduler.schedule()
    assert scheduler.abort(0)
    assert scheduler.finish(1, FinishReason.STOP)
    assert not scheduler.abort(0)
    assert not scheduler.finish(99, FinishReason.STOP)
    assert (running.finish_reason, waiting.finish_reason) == (FinishReason.ABORT, FinishReason.STOP)
    assert (kv.num_used_blocks, scheduler.has_work) == (0, False)
    assert scheduler.schedule().is_empty
    scheduler.check_integrity()


def test_a_failed_step_ends_its_sequences_and_shares_nothing_of_it() -> None:
    kv = make_kv()
    scheduler, runner = make_scheduler(kv=kv), PagedRunner()
    add(scheduler, make_sequence(0, range(12)))
    output = scheduler.schedule()
    runner.run(output)
    later = make_sequence(1, range(12))
    scheduler.add(later)
    scheduler.fail([s.seq_id for s in output.scheduled])
    step(scheduler, runner)
    assert (later.num_cached_tokens, later.num_output_tokens) == (0, 1)
    scheduler.check_integrity()


def test_a_long_prompt_never_stops_running_decodes() -> None:
    kv = make_kv(num_blocks=700)
    scheduler = make_scheduler(kv=kv, max_model_len=2100, max_num_batched_tokens=64)
    runner = PagedRunner(max_model_len=2100)
    decoding = add(scheduler, *(make_sequence(i, [i, 1, 2], max_tokens=900) for i in range(7)))
    step(scheduler, runner)
    (long,) = add(scheduler, make_sequence(7, [5] * 2000, max_tokens=1))
    num_steps = 0
    while not long.is_finished:
        before = [seq.num_tokens for seq in decoding]
        output = scheduler.schedule()
        assert output.num_scheduled_tokens <= 64
        # The target's numbers do not matter here: drafts and tokens are made up, to stay fast.
        runner_output = _made_up(output.scheduled)
        scheduler.update_from_output(output, runner_output)
        assert all(seq.num_tokens > old for seq, old in zip(decoding, before, strict=True))
        num_steps += 1
    assert num_steps == -(-2000 // (64 - 7 * 4)), "the prompt gets all that decodes and drafts leave"


@pytest.mark.parametrize("budget", [8, 9, 16, 40])
def test_decodes_with_drafts_never_stop_a_prefill(budget: int) -> None:
    scheduler = make_scheduler(kv=make_kv(num_blocks=300), max_model_len=256, max_num_batched_tokens=budget)
    decoding = add(scheduler, *(make_sequence(i, [i], max_tokens=250) for i in range(7)))
    while any(seq.num_output_tokens < 2 for seq in decoding):
        output = scheduler.schedule()
        scheduler.update_from_output(output, _made_up(output.scheduled))
    (prompt,) = add(scheduler, make_sequence(7, range(40), max_tokens=1))
    while not prompt.is_finished:
        output = scheduler.schedule()
        by_id = {s.seq_id: s for s in output.scheduled}
        assert {*range(8)} == by_id.keys()
        assert len(by_id[7].token_ids) >= min(-(-(budget - 7) // 2), 40 - by_id[7].start)
        scheduler.update_from_output(output, _made_up(output.scheduled))


def test_siblings_in_one_step_compute_for_themselves_and_later_ones_share() -> None:
    kv = make_kv()
    scheduler, runner = make_scheduler(kv=kv, max_num_batched_tokens=8, max_num_seqs=8), PagedRunner()
    first, sibling = add(scheduler, make_sequence(0, range(18)), make_sequence(1, range(18)))
    step(scheduler, runner)
    assert (first.num_cached_tokens, sibling.num_cached_tokens) == (0, None), "the budget went to the first"
    step(scheduler, runner)
    step(scheduler, runner)  # the first samples from 2 rows; its sibling is admitted with the 6 that are left
    assert sibling.num_cached_tokens == 16
    assert sibling.token_ids[:19] == first.token_ids[:19]
    (late,) = add(scheduler, make_sequence(2, range(18), cache_salt="other"))
    while scheduler.has_work:
        step(scheduler, runner)
    assert late.num_cached_tokens == 0
    assert late.output_token_ids == first.output_token_ids
    assert (kv.prefix_stats.queries, kv.prefix_stats.hits) == (54, 16)


def test_blocks_allocated_but_not_computed_are_not_shared() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    first, sibling = add(scheduler, make_sequence(0, range(18)), make_sequence(1, range(18)))
    runner = PagedRunner()
    step(scheduler, runner)
    scheduler.abort(0)
    step(scheduler, runner)
    assert sibling.num_cached_tokens == 8
    assert first.is_finished


def test_the_last_in_order_gives_way_and_comes_back_first() -> None:
    kv = make_kv(num_blocks=8, has_drafter=False)
    scheduler = make_scheduler(kv=kv, max_model_len=32, num_speculative_tokens=0)
    runner = PagedRunner(num_speculative_tokens=0)
    old, young = add(scheduler, make_sequence(0, range(11), max_tokens=20), make_sequence(1, [7] * 11, max_tokens=20))
    preempted: list[int] = []
    while not old.is_finished:
        if preempted and scheduler.num_waiting == 1:
            scheduler.add(make_sequence(2, [9], max_tokens=2))
        output = scheduler.schedule()
        preempted += output.preempted_seq_ids
        scheduler.update_from_output(output, runner.run(output))
        scheduler.check_integrity()
    assert preempted == [1]
    assert (old.num_preemptions, young.num_preemptions, scheduler.num_preemptions) == (0, 1, 1)
    step(scheduler, runner)
    assert young.status is SequenceStatus.RUNNING
    while scheduler.has_work:
        step(scheduler, runner)
    assert young.output_token_ids == runner.generate([7] * 11, seed=0, num_tokens=20)


def test_priority_decides_admission_and_victims() -> None:
    kv = make_kv(num_blocks=8, has_drafter=False)
    scheduler = make_scheduler(kv=kv, max_model_len=32, num_speculative_tokens=0, policy="priority", max_num_seqs=2)
    runner = PagedRunner(num_speculative_tokens=0)
    low, high = add(
        scheduler,
        make_sequence(0, range(11), max_tokens=20, priority=3),
        make_sequence(1, [7] * 11, max_tokens=20, priority=-1),
    )
    while not high.is_finished:
        step(scheduler, runner)
    assert (high.num_preemptions, low.num_preemptions) == (0, 1)


def test_drafts_are_dropped_before_anyone_is_preempted() -> None:
    kv = make_kv(num_blocks=9)
    scheduler = make_scheduler(kv=kv, max_model_len=32, num_speculative_tokens=7)
    runner = PagedRunner(num_speculative_tokens=7, percent_right=0, max_model_len=32)
    seqs = add(scheduler, make_sequence(0, range(9), max_tokens=7), make_sequence(1, [7] * 9, max_tokens=7))
    has_dropped = False
    while scheduler.has_work:
        had_drafts = any(seq.draft_token_ids for seq in seqs)
        output = scheduler.schedule()
        has_dropped |= had_drafts and any(not s.num_draft_tokens for s in output.scheduled)
        scheduler.update_from_output(output, runner.run(output))
    assert has_dropped
    assert scheduler.num_preemptions == 0


def test_a_newcomer_leaves_a_block_to_each_running_sequence() -> None:
    kv = make_kv(num_blocks=8, has_drafter=False)
    scheduler = make_scheduler(kv=kv, max_model_len=32, num_speculative_tokens=0)
    runner = PagedRunner(num_speculative_tokens=0)
    first, newcomer = add(scheduler, make_sequence(0, range(15)), make_sequence(1, [7] * 15))
    step(scheduler, runner)
    assert scheduler.num_waiting == 1, "8 blocks would do now, and be one short in two steps"
    while not first.is_finished:
        step(scheduler, runner)
    step(scheduler, runner)
    assert newcomer.status is SequenceStatus.RUNNING
    assert scheduler.num_preemptions == 0


def test_a_burst_is_served_as_the_load_that_it_will_be() -> None:
    class LowLoadOnly(FixedDepth):
        def uses_head(self, seq_id: int, num_running: int) -> bool:
            return num_running < 2

    kv = make_kv(num_blocks=64)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    speculation = Speculation(num_speculative_tokens=3, policy=LowLoadOnly(3))
    scheduler = Scheduler(config, kv, max_model_len=64, speculation=speculation)
    burst = add(scheduler, *(make_sequence(index, range(5)) for index in range(5)))
    scheduler.schedule()
    assert not any(seq.uses_head for seq in burst)
    alone = make_scheduler(kv=make_kv())
    (single,) = add(alone, make_sequence(9, range(5)))
    alone.schedule()
    assert single.uses_head


def test_the_last_in_order_waits_with_its_blocks_while_others_go_on() -> None:
    kv = make_kv(num_blocks=8, has_drafter=False)
    scheduler = make_scheduler(kv=kv, max_model_len=32, num_speculative_tokens=0)
    runner = PagedRunner(num_speculative_tokens=0)
    first, last = add(scheduler, make_sequence(0, range(15), max_tokens=4), make_sequence(1, [7] * 11, max_tokens=8))
    waited = 0
    while not first.is_finished:
        output = scheduler.schedule()
        is_scheduled = {s.seq_id for s in output.scheduled}
        assert 0 in is_scheduled
        waited += 1 not in is_scheduled
        assert scheduler.num_running == 2
        scheduler.update_from_output(output, runner.run(output))
        scheduler.check_integrity()
    assert waited == 2
    while scheduler.has_work:
        step(scheduler, runner)
    assert scheduler.num_preemptions == 0
    assert last.output_token_ids == runner.generate([7] * 11, seed=0, num_tokens=8)


def test_integrity_knows_the_limit_of_running_sequences() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, make_sequence(0))
    scheduler.schedule()
    scheduler._running[1] = make_sequence(1)
    with pytest.raises(IntegrityError, match="2 sequences run, more than 1"):
        scheduler.check_integrity()


def _made_up(scheduled: tuple[ScheduledSequence, ...]) -> ModelRunnerOutput:
    """A step in which every draft is rejected and every proposal is as long as allowed."""
    return ModelRunnerOutput(
        outputs=tuple(
            SequenceOutput(
                seq_id=s.seq_id,
                token_ids=[3] if s.is_sampling else [],
                num_accepted_tokens=0,
                draft_token_ids=[4] * s.max_next_drafts,
            )
            for s in scheduled
        )
    )
