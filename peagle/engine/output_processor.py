"""From committed tokens to what clients get: text, finish reasons, usage, latencies.

Owns everything of a request that is about text and time, and the last word on where an answer ends: a stop string may
cut inside the tokens of one step, and then text, token ids and usage all end at the token that completed it. Refuses to
know scheduling; it tells the engine which sequences ended early.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peagle.outputs import RequestOutput, SequenceCommit, Usage
from peagle.sequence import FinishReason, Sequence
from peagle.stats import EngineStats
from peagle.text.detokenizer import IncrementalDetokenizer
from peagle.text.stop import StopMatcher
from peagle.text.tokenizer import Tokenizer

_PROMPT_TAIL = 8  # tokens of the prompt that show a decoder that the answer goes on with a text


@dataclass(slots=True, kw_only=True)
class RequestState:
    """One request under way. Written by the output processor only."""

    seq: Sequence
    detokenizer: IncrementalDetokenizer
    stop_matcher: StopMatcher
    num_output_tokens: int = 0
    first_scheduled_time: float | None = None
    last_token_time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedStep:
    """Outputs for clients, and sequences that a stop string ended although the scheduler has them running."""

    outputs: list[RequestOutput]
    stopped_seq_ids: list[int] = field(default_factory=list)


class OutputProcessor:
    """Keeps the text side of every request.

    Args:
        tokenizer: of the target.
        stats: counters to write; the engine thread is the only writer.
    """

    def __init__(self, tokenizer: Tokenizer, stats: EngineStats) -> None:
        self._tokenizer = tokenizer
        self._stats = stats
        self._requests: dict[int, RequestState] = {}
        for reason in FinishReason:
            stats.requests_by_reason.setdefault(reason.value, 0)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def add(self, seq: Sequence) -> None:
        """Start a request."""
        tail = seq.token_ids[-_PROMPT_TAIL:]
        self._requests[seq.seq_id] = RequestState(
            seq=seq,
            detokenizer=IncrementalDetokenizer(self._tokenizer, prompt_tail_ids=tail),
            stop_matcher=StopMatcher(seq.params.stop),
        )

    def mark_scheduled(self, seq_ids: list[int], now: float) -> None:
        """Note the first step of each sequence, which ends its time in the queue.

        Args:
            seq_ids: sequences of the step that is about to run.
            now: `time.monotonic()` seconds.
        """
        for seq_id in seq_ids:
            state = self._requests.get(seq_id)
            if state is not None and state.first_scheduled_time is None:
                state.first_scheduled_time = now
                self._stats.queue_time_s.observe(now - state.seq.arrival_time)
                self._stats.prompt_tokens += state.seq.num_prompt_tokens

    def process(self, commits: list[SequenceCommit], now: float) -> ProcessedStep:
        """Turn a step's commits into outputs.

        Args:
            commits: what the scheduler committed.
            now: `time.monotonic()` seconds at the end of the step.
        """
        step = ProcessedStep(outputs=[])
        for commit in commits:
            state = self._requests.get(commit.seq_id)
            if state is None:
                continue
            output = self._advance(state, commit)
            self._observe_tokens(state, len(output.token_ids), now)
            step.outputs.append(output)
            if output.finish_reason is not None:
                if commit.finish_reason is None:
                    step.stopped_seq_ids.append(commit.seq_id)
                self._close(state, output.finish_reason, now)
        return step

    def end(self, seq_id: int, reason: FinishReason, now: float, *, error: str | None = None) -> RequestOutput | None:
        """End a request from outside (client gone, step failed); None if it has ended already."""
        state = self._requests.get(seq_id)
        if state is None:
            return None
        text = state.stop_matcher.push(state.detokenizer.flush()).text_to_emit + state.stop_matcher.flush().text_to_emit
        self._close(state, reason, now)
        return RequestOutput(
            request_id=state.seq.request_id,
            text=text,
            token_ids=[],
            finish_reason=reason,
            usage=_usage(state),
            error=error,
        )

    def _advance(self, state: RequestState, commit: SequenceCommit) -> RequestOutput:
        token_ids = list(commit.new_token_ids)
        # The token that ended the answer by its id counts as a token, but is not part of the text.
        num_spoken = len(token_ids) - (commit.finish_reason is FinishReason.STOP)
        text: list[str] = []
        for count, token_id in enumerate(token_ids[:num_spoken], start=1):
            result = state.stop_matcher.push(state.detokenizer.push(token_id))
            text.append(result.text_to_emit)
            if result.matched is not None:
                state.num_output_tokens += count
                return self._output(state, text, token_ids[:count], FinishReason.STOP, result.matched)
        state.num_output_tokens += len(token_ids)
        if commit.finish_reason is None:
            return self._output(state, text, token_ids, None, None)
        tail = state.stop_matcher.push(state.detokenizer.flush())
        text.append(tail.text_to_emit)
        if tail.matched is not None:  # completed by bytes that had been waiting for the rest of a character
            return self._output(state, text, token_ids, FinishReason.STOP, tail.matched)
        text.append(state.stop_matcher.flush().text_to_emit)
        stop_token = token_ids[-1] if commit.finish_reason is FinishReason.STOP else None
        return self._output(state, text, token_ids, commit.finish_reason, stop_token)

    def _output(
        self,
        state: RequestState,
        text: list[str],
        token_ids: list[int],
        reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=state.seq.request_id,
            text="".join(text),
            token_ids=token_ids,
            finish_reason=reason,
            usage=_usage(state),
            stop_reason=stop_reason,
        )

    def _observe_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        if num_tokens == 0:
            return
        self._stats.generation_tokens += num_tokens
        num_gaps = num_tokens
        if state.last_token_time is None:
            self._stats.time_to_first_token_s.observe(now - state.seq.arrival_time)
        else:
            # Tokens of one step arrive together; each is charged its share of the wait.
            self._stats.inter_token_latency_s.observe((now - state.last_token_time) / num_gaps, times=num_gaps)
        state.last_token_time = now

    def _close(self, state: RequestState, reason: FinishReason, now: float) -> None:
        del self._requests[state.seq.seq_id]
        self._stats.requests_by_reason[reason.value] += 1
        self._stats.e2e_request_latency_s.observe(now - state.seq.arrival_time)


def _usage(state: RequestState) -> Usage:
    return Usage(
        prompt_tokens=state.seq.num_prompt_tokens,
        completion_tokens=state.num_output_tokens,
        cached_tokens=state.seq.num_cached_tokens or 0,
    )
