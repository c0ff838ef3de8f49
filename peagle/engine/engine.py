"""The engine: requests in, one step at a time, outputs out. Synchronous; the thread around it is `async_engine`.

A step is schedule, run, commit, speak. Owns this loop and the isolation of failures: because drafter and verifier only
propose, a step that raised can be run again, one sequence at a time, and only the sequences that raise on their own
fail. Refuses to know threads, HTTP and tensors (the runner is given).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from peagle.engine.grammar_guide import GrammarGuide
from peagle.engine.output_processor import OutputProcessor
from peagle.engine.token_ids import check_token_ids
from peagle.errors import (
    ContextLengthError,
    DeviceLostError,
    EngineOverloadedError,
    IntegrityError,
    InvalidParameterError,
    RequestError,
)
from peagle.grammar.compiler import GrammarCompiler
from peagle.kv_cache.cache_manager import KVCacheManager
from peagle.outputs import (
    NOT_NUMBERS,
    ModelRunnerOutput,
    RequestInput,
    RequestOutput,
    ScheduledSequence,
    SchedulerOutput,
    SequenceCommit,
    SequenceOutput,
)
from peagle.sampling_params import SamplingParams
from peagle.scheduler.scheduler import Scheduler
from peagle.sequence import FinishReason, Sequence
from peagle.stats import NO_DRAFTER, EngineStats, GraphStats, RequestStats, SpecDecodeStats, StepStats
from peagle.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Executes a scheduled step on the device."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run target, verification and drafting; one output per scheduled sequence, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of. Built by `loader`, or by a test.

    Attributes:
        cuts_drafts: leave out drafts that a grammar forbids; see `GrammarGuide`.
        drafter_name: who drafts, for people and metrics.
        graph_stats: counters of what runs at fixed shapes, by who runs it; they count on, and are only read here.
    """

    scheduler: Scheduler
    kv: KVCacheManager
    runner: Runner
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    num_speculative_tokens: int = 0
    cuts_drafts: bool = True
    drafter_name: str = NO_DRAFTER
    graph_stats: Mapping[str, GraphStats] = field(default_factory=dict)
    seed: int = 0
    clock: Callable[[], float] = time.monotonic


class LLMEngine:
    """Continuous batching over a scheduler, a runner and an output processor."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._clock = parts.clock
        self._stats = EngineStats(
            num_kv_blocks=parts.kv.num_blocks,
            block_size=parts.kv.block_size,
            max_model_len=parts.max_model_len,
            drafter=parts.drafter_name,
            num_speculative_tokens=parts.num_speculative_tokens,
            graphs=dict(parts.graph_stats),
            prefix_cache=parts.kv.prefix_stats,
            spec_decode=SpecDecodeStats.for_depth(parts.num_speculative_tokens),
            steps=StepStats.for_depth(parts.num_speculative_tokens),
            requests=RequestStats.up_to(parts.max_model_len),
        )
        self._processor = OutputProcessor(parts.tokenizer, self._stats)
        self._guide = GrammarGuide(GrammarCompiler(parts.tokenizer), cuts_drafts=parts.cuts_drafts)
        self._seeds = random.Random(parts.seed)
        self._seq_ids: dict[str, int] = {}
        self._request_ids: dict[int, str] = {}
        self._num_sequences = 0

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        return self._parts.max_model_len

    @property
    def has_work(self) -> bool:
        """True if a step would do something."""
        return self._scheduler.has_work

    def check_request(self, request: RequestInput) -> int:
        """Validate a request against the model; safe to call from any thread.

        Returns:
            The length in tokens at which the sequence will end.

        Raises:
            ContextLengthError: the prompt leaves no room, or prompt and max_tokens together do not fit.
            InvalidParameterError: an empty prompt, a token id outside the vocabulary, or a grammar without an end.
        """
        check_token_ids(request.params, vocab_size=self._parts.vocab_size)
        if request.params.grammar is not None and request.params.ignore_eos:
            raise InvalidParameterError(
                "ignore_eos cannot go with a grammar, which says where to end", param="ignore_eos"
            )
        num_prompt, limit = len(request.prompt_token_ids), self._parts.max_model_len
        if num_prompt == 0:
            raise InvalidParameterError("the prompt is empty", param="messages")
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self._parts.vocab_size:
            raise InvalidParameterError("the prompt has a token id outside the vocabulary", param="messages")
        if num_prompt >= limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens, but the prompt has {num_prompt} tokens. "
                "Shorten the prompt.",
                param="messages",
            )
        max_tokens = request.params.max_tokens
        if max_tokens is None:
            return limit
        if num_prompt + max_tokens > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens, but {num_prompt + max_tokens} tokens were "
                f"requested ({num_prompt} in the prompt, {max_tokens} for the answer). Shorten the prompt or lower "
                "max_tokens.",
                param="messages",
            )
        return num_prompt + max_tokens

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes time before a request is added, from any thread: its grammar is compiled, and remembered.

        Raises:
            InvalidParameterError: the grammar can't be used.
        """
        if params.grammar is not None:
            self._guide.compiler.compile(params.grammar)

    def add_request(self, request: RequestInput) -> None:
        """Admit a request to the waiting queue.

        Raises:
            RequestError: see `check_request`; also a request id that is under way.
            EngineOverloadedError: the queue is full.
        """
        max_num_tokens = self.check_request(request)
        if request.request_id in self._seq_ids:
            raise InvalidParameterError(f"request id {request.request_id!r} is already under way", param="request_id")
        # Drawn for every request, so that a seedless request does not depend on whether others brought a seed.
        drawn_seed = self._seeds.getrandbits(63)
        seq = Sequence(
            seq_id=self._num_sequences,
            request_id=request.request_id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            params=request.params,
            seed=drawn_seed if request.params.seed is None else request.params.seed,
            eos_token_ids=self._parts.tokenizer.eos_token_ids,
            max_num_tokens=max_num_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            arrival_time=request.arrival_time or self._clock(),
            predicted_token_ids=tuple(request.predicted_token_ids),
        )
        if request.params.grammar is not None:
            self._guide.add(seq.seq_id, request.params.grammar)
        try:
            self._scheduler.add(seq)
        except (RequestError, EngineOverloadedError):
            self._guide.forget(seq.seq_id)
            raise
        self._num_sequences += 1
        self._seq_ids[request.request_id] = seq.seq_id
        self._request_ids[seq.seq_id] = request.request_id
        self._processor.add(seq)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request with ABORT and free its blocks; None if it is unknown or has ended."""
        seq_id = self._seq_ids.get(request_id)
        return None if seq_id is None else self._end(seq_id, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of every sequence that got tokens or ended."""
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan.is_empty:
            return []
        self._processor.mark_scheduled([s.seq_id for s in plan.scheduled], self._clock())
        plan = self._guide.constrain(plan)
        outputs = self._guide.without_lost(self._execute(plan))
        failed = [
            self._end(output.seq_id, FinishReason.ERROR, error=output.error)
            for output in outputs.outputs
            if output.error is not None
        ]
        commits = self._scheduler.update_from_output(plan, outputs)
        self._guide.advance(commits)
        now = self._clock()
        processed = self._processor.process(commits, now)
        for seq_id in processed.stopped_seq_ids:
            self._scheduler.finish(seq_id, FinishReason.STOP)
        for output in processed.outputs:
            if output.is_finished:
                self._forget(output.request_id)
        self._count_step(plan, outputs, commits, seconds=time.perf_counter() - started)
        self._stats.last_step_time = now
        return [output for output in failed if output is not None] + processed.outputs

    def abort_all(self) -> list[RequestOutput]:
        """End every request with ABORT."""
        ended = [self._end(seq_id, FinishReason.ABORT) for seq_id in list(self._request_ids)]
        return [output for output in ended if output is not None]

    def stats(self) -> EngineStats:
        """A snapshot of the counters that later steps do not touch."""
        stats = self._stats
        stats.num_running = self._scheduler.num_running
        stats.num_waiting = self._scheduler.num_waiting
        stats.num_with_head = self._scheduler.num_with_head
        stats.num_preemptions = self._scheduler.num_preemptions
        stats.kv_cache_usage = self._parts.kv.usage
        return stats.copy()

    def check_integrity(self) -> None:
        """Compare scheduler, cache and requests with one another.

        Raises:
            IntegrityError: with the first contradiction found.
        """
        self._scheduler.check_integrity()  # the pools included
        num_scheduled = self._scheduler.num_running + self._scheduler.num_waiting
        counts = {num_scheduled, self._processor.num_requests, len(self._seq_ids), len(self._request_ids)}
        if len(counts) > 1:
            raise IntegrityError(
                f"{num_scheduled} sequences are scheduled, {self._processor.num_requests} have text, "
                f"{len(self._seq_ids)} have a name"
            )

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run the step; if it raises, again, sequence by sequence, so that only the poisoned ones carry an error."""
        try:
            return self._parts.runner.execute(plan)
        except DeviceLostError:
            raise  # nobody's fault, and nothing would succeed: the engine ends, and /health says so
        except Exception:
            logger.exception("a step of %d sequences raised; running them one by one", len(plan.scheduled))
        return ModelRunnerOutput(outputs=tuple(self._execute_alone(scheduled) for scheduled in plan.scheduled))

    def _execute_alone(self, scheduled: ScheduledSequence) -> SequenceOutput:
        alone = SchedulerOutput(scheduled=(scheduled,), num_scheduled_tokens=len(scheduled.token_ids))
        try:
            return self._parts.runner.execute(alone).outputs[0]
        except DeviceLostError:
            raise
        except Exception as error:
            logger.exception("request %s failed in a step of its own", self._request_ids[scheduled.seq_id])
            return SequenceOutput(
                seq_id=scheduled.seq_id,
                token_ids=(),
                num_accepted_tokens=0,
                error=f"the engine failed on this request ({type(error).__name__})",
            )

    def _count_step(
        self, plan: SchedulerOutput, ran: ModelRunnerOutput, commits: list[SequenceCommit], *, seconds: float
    ) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.num_corrupted_requests += sum(output.error == NOT_NUMBERS for output in ran.outputs)
        for commit in commits:
            stats.spec_decode.observe(
                num_draft_tokens=commit.num_draft_tokens,
                num_accepted_tokens=commit.num_accepted_tokens,
                draft_parents=commit.draft_parents,
            )
        stats.steps.num_tokens.observe(plan.num_scheduled_tokens)
        for scheduled in plan.scheduled:
            if scheduled.is_sampling and scheduled.num_known_tokens == 1:
                stats.steps.num_verified_drafts.observe(scheduled.num_draft_tokens)
        if ran.timing is not None:
            stats.steps.verify_s.observe(ran.timing.verify_s)
            stats.steps.draft_s.observe(ran.timing.draft_s)
            stats.steps.host_s.observe(max(seconds - ran.timing.verify_s - ran.timing.draft_s, 0.0))

    def _end(self, seq_id: int, reason: FinishReason, *, error: str | None = None) -> RequestOutput | None:
        self._scheduler.finish(seq_id, reason)
        output = self._processor.end(seq_id, reason, self._clock(), error=error)
        if output is not None:
            self._forget(output.request_id)
        return output

    def _forget(self, request_id: str) -> None:
        seq_id = self._seq_ids.pop(request_id)
        del self._request_ids[seq_id]
        self._guide.forget(seq_id)
