"""Random lives of random requests: whatever arrives, ends, fails or runs short, every answer is the plain one."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import SchedulingPolicy
from peagle.outputs import SchedulerOutput, SequenceCommit
from peagle.sampling_params import SamplingParams
from peagle.scheduler import Scheduler
from peagle.scheduler.commit import cut_at_end
from peagle.sequence import FinishReason, Sequence
from tests.builders.paged_runner import PagedRunner
from tests.builders.scheduler import make_kv, make_scheduler, make_sequence

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
EOS = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a scenario. Prompts are cut from few texts, so that prefixes are often shared."""

    text: int
    num_shared: int
    num_own: int
    max_tokens: int
    seed: int
    priority: int
    salt: str | None
    ignore_eos: bool
    arrival_step: int
    abort_step: int | None
    is_aborted_in_flight: bool

    def to_sequence(self, seq_id: int) -> Sequence:
        shared = [1 + (self.text * 7 + i * i) % 11 for i in range(self.num_shared)]
        own = [12 + (seq_id + i) % 5 for i in range(self.num_own)]
        prompt = (shared + own)[: MAX_MODEL_LEN - 1]
        return make_sequence(
            seq_id,
            prompt,
            max_tokens=min(self.max_tokens, MAX_MODEL_LEN - len(prompt)),
            seed=self.seed,
            priority=self.priority,
            cache_salt=self.salt,
            eos_token_ids=[EOS],
            params=SamplingParams(ignore_eos=self.ignore_eos),
        )


REQUESTS = st.lists(
    st.builds(
        Request,
        text=st.integers(0, 1),
        num_shared=st.integers(1, 20),
        num_own=st.integers(0, 10),
        max_tokens=st.integers(1, 20),
        seed=st.integers(0, 1),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
        ignore_eos=st.booleans(),
        arrival_step=st.integers(0, 12),
        abort_step=st.sampled_from([None, None, None, 3, 8, 14]),
        is_aborted_in_flight=st.booleans(),
    ),
    min_size=1,
    max_size=9,
)


@dataclass(kw_only=True)
class Scenario:
    """Runs requests to their ends, checking every hand-off and every invariant on the way."""

    scheduler: Scheduler
    runner: PagedRunner
    requests: list[Request]
    failing_step: int | None
    seqs: dict[int, Sequence] = field(default_factory=dict)
    said: dict[int, list[int]] = field(default_factory=dict)
    num_steps: int = 0

    def run(self) -> None:
        most_steps = 40 + len(self.requests) * sum(
            seq.max_num_tokens for seq in (request.to_sequence(i) for i, request in enumerate(self.requests))
        )
        while len(self.seqs) < len(self.requests) or self.scheduler.has_work:
            self._arrive()
            self._abort(is_in_flight=False)
            self._step()
            self.scheduler.check_integrity()
            self.num_steps += 1
            assert self.num_steps < most_steps, "a sequence starves"

    def _arrive(self) -> None:
        for index, request in enumerate(self.requests):
            if request.arrival_step <= self.num_steps and index not in self.seqs:
                self.seqs[index] = request.to_sequence(index)
                self.said[index] = []
                self.scheduler.add(self.seqs[index])

    def _abort(self, *, is_in_flight: bool) -> None:
        for index, request in enumerate(self.requests):
            if request.abort_step == self.num_steps and request.is_aborted_in_flight is is_in_flight:
                self.scheduler.abort(index)

    def _step(self) -> None:
        output = self.scheduler.schedule()
        assert output.is_empty == (not self.scheduler.has_work), "work means progress"
        self._check_hand_off(output)
        runner_output = self.runner.run(output)
        self._abort(is_in_flight=True)
        if self.num_steps == self.failing_step:
            self.scheduler.fail([scheduled.seq_id for scheduled in output.scheduled])
            return
        for commit in self.scheduler.update_from_output(output, runner_output):
            self._check_commit(commit)
        for scheduled in output.scheduled:
            seq = self.seqs[scheduled.seq_id]
            if not seq.is_finished:
                self._check_drafter_kv(seq, list(scheduled.drafter_block_table))

    def _check_hand_off(self, output: SchedulerOutput) -> None:
        config = self.scheduler._config
        assert output.num_scheduled_tokens == sum(len(s.token_ids) for s in output.scheduled)
        assert output.num_scheduled_tokens <= config.token_budget
        assert len({s.seq_id for s in output.scheduled}) == len(output.scheduled) <= config.max_num_seqs
        assert not {s.seq_id for s in output.scheduled} & set(output.preempted_seq_ids)
        is_sampling = [s.is_sampling for s in output.scheduled]
        assert is_sampling == sorted(is_sampling, reverse=True)
        for s in output.scheduled:
            seq = self.seqs[s.seq_id]
            end = s.start + s.num_known_tokens
            num_rows = s.start + len(s.token_ids)
            assert s.start == seq.num_computed_tokens
            assert s.token_ids == seq.token_ids[s.start : end] + seq.draft_token_ids[: s.num_draft_tokens]
            assert s.is_sampling == (end == seq.num_tokens)
            assert s.next_token_id == (None if s.is_sampling else seq.token_ids[end])
            assert seq.num_tokens + s.num_draft_tokens + 1 <= seq.max_num_tokens
            assert len(s.block_table) * BLOCK_SIZE >= num_rows
            if s.max_next_drafts:
                assert s.is_sampling
                assert seq.num_tokens + 1 + s.max_next_drafts + 1 <= seq.max_num_tokens
            if self.runner.num_speculative_tokens:
                num_slots = num_rows + max(0, self.runner.num_speculative_tokens - 1) * (s.max_next_drafts > 0)
                assert len(s.drafter_block_table) * BLOCK_SIZE >= min(num_slots, MAX_MODEL_LEN)

    def _check_commit(self, commit: SequenceCommit) -> None:
        seq = self.seqs[commit.seq_id]
        self.said[commit.seq_id] += commit.new_token_ids
        assert commit.new_token_ids
        assert commit.finish_reason == seq.finish_reason
        assert self.said[commit.seq_id] == seq.output_token_ids
        assert seq.num_computed_tokens == seq.num_tokens - 1 or (
            seq.is_finished and seq.num_computed_tokens == seq.num_tokens
        )

    def _check_drafter_kv(self, seq: Sequence, table: list[int]) -> None:
        if self.runner.num_speculative_tokens:
            expected = self.runner.expected_drafter_kv(seq.token_ids, seq.num_computed_tokens)
            assert self.runner._read(self.runner.drafter_kv, table, seq.num_computed_tokens) == expected

    def check_answers(self) -> None:
        """Every answer is the plain one; a request that was ended from outside got a prefix of it."""
        for index, seq in self.seqs.items():
            fresh = self.requests[index].to_sequence(index)
            plain = self.runner.generate(fresh.token_ids, seed=seq.seed, num_tokens=20)
            cut = cut_at_end(fresh, plain)
            if seq.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert cut.token_ids[: seq.num_output_tokens] == seq.output_token_ids
            else:
                assert (seq.output_token_ids, seq.finish_reason) == (list(cut.token_ids), cut.finish_reason)


@settings(max_examples=250, deadline=None)
@given(
    requests=REQUESTS,
    num_speculative_tokens=st.integers(0, 5),
    percent_right=st.sampled_from([0, 50, 80, 100]),
    num_spare_blocks=st.sampled_from([0, 1, 2, 4, 40]),
    max_num_seqs=st.integers(1, 6),
    num_more_tokens=st.sampled_from([0, 1, 5, 60]),
    policy=st.sampled_from(["fcfs", "priority"]),
    enable_prefix_caching=st.booleans(),
    failing_step=st.sampled_from([None, None, None, 2, 9]),
)
def test_every_answer_is_the_plain_one(
    requests: list[Request],
    num_speculative_tokens: int,
    percent_right: int,
    num_spare_blocks: int,
    max_num_seqs: int,
    num_more_tokens: int,
    policy: SchedulingPolicy,
    enable_prefix_caching: bool,
    failing_step: int | None,
) -> None:
    kv = make_kv(
        num_blocks=MAX_MODEL_LEN // BLOCK_SIZE + num_spare_blocks,
        has_drafter=num_speculative_tokens > 0,
        enable_prefix_caching=enable_prefix_caching,
    )
    scheduler = make_scheduler(
        kv=kv,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + num_more_tokens,
        max_model_len=MAX_MODEL_LEN,
        num_speculative_tokens=num_speculative_tokens,
        policy=policy,
    )
    runner = PagedRunner(
        num_speculative_tokens=num_speculative_tokens,
        percent_right=percent_right,
        vocab_size=18,
        max_model_len=MAX_MODEL_LEN,
    )
    scenario = Scenario(scheduler=scheduler, runner=runner, requests=requests, failing_step=failing_step)
    scenario.run()
    scenario.check_answers()
    assert kv.num_used_blocks == 0
    assert all(not pool._chains for pool in kv._pools), "nothing is remembered of ended sequences"


def longest_hit(seq: Sequence, ended: list[Sequence], *, num_lookahead_tokens: int) -> int:
    """The slow reference: the longest whole-block prefix that some ended sequence computed, tokens compared one by one.

    At least one prompt token is left over, which also makes the lookahead token part of the prompt.
    """
    prompt = seq.token_ids[: seq.num_prompt_tokens]
    best = 0
    for other in ended:
        if other.cache_salt != seq.cache_salt:
            continue
        for hit in range(0, len(prompt), BLOCK_SIZE):
            certified = prompt[: hit + num_lookahead_tokens]
            if hit <= other.num_computed_tokens and other.token_ids[: len(certified)] == certified:
                best = max(best, hit)
    return best


@settings(max_examples=80, deadline=None)
@given(requests=REQUESTS, num_speculative_tokens=st.sampled_from([0, 3]))
def test_hits_in_a_roomy_pool_are_the_longest_possible(requests: list[Request], num_speculative_tokens: int) -> None:
    kv = make_kv(num_blocks=200, has_drafter=num_speculative_tokens > 0)
    scheduler = make_scheduler(kv=kv, max_model_len=MAX_MODEL_LEN, num_speculative_tokens=num_speculative_tokens)
    runner = PagedRunner(num_speculative_tokens=num_speculative_tokens, max_model_len=MAX_MODEL_LEN)
    ended: list[Sequence] = []
    for index, request in enumerate(requests):
        seq = request.to_sequence(index)
        scheduler.add(seq)
        while scheduler.has_work:
            output = scheduler.schedule()
            scheduler.update_from_output(output, runner.run(output))
        num_lookahead_tokens = int(num_speculative_tokens > 0)
        assert seq.num_cached_tokens == longest_hit(seq, ended, num_lookahead_tokens=num_lookahead_tokens)
        ended.append(seq)
    assert kv.prefix_stats.queries == sum(seq.num_prompt_tokens for seq in ended)
    assert kv.prefix_stats.hits == sum(seq.num_cached_tokens or 0 for seq in ended)
