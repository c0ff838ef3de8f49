"""From committed tokens to what clients get: text, finish reasons, usage, latencies.

Owns everything of a request that is about text and time, and the last word on where an answer ends: a stop string may
cut inside the tokens of one step, and then text, token ids and usage all end at the token that completed it. Refuses to
know scheduling; it tells the engine which sequences ended early.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from peagle.engine.request_meter import RequestMeter, RequestMoments
from peagle.outputs import RequestOutput, RequestTimes, SequenceCommit, Usage
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
    moments: RequestMoments
    num_output_tokens: int = 0


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
        self._meter = RequestMeter(stats)
        self._requests: dict[int, RequestState] = {}

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
            moments=RequestMoments(seq=seq),
        )

    def mark_scheduled(self, seq_ids: list[int], now: float) -> None:
        """Note the first step of each sequence, which ends its time in the queue.

        Args:
            seq_ids: sequences of the step that is about to run.
            now: `time.monotonic()` seconds.
        """
        for seq_id in seq_ids:
            state = self._requests.get(seq_id)
            if state is not None:
                self._meter.note_scheduled(state.moments, now)

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
            self._meter.note_committed(state.moments, commit)
            output = self._advance(state, commit)
            self._meter.note_tokens(state.moments, len(output.token_ids), now)
            if output.finish_reason is not None:
                if commit.finish_reason is None:
                    step.stopped_seq_ids.append(commit.seq_id)
                output = replace(output, times=self._close(state, output.finish_reason, now))
            step.outputs.append(output)
        return step

    def end(self, seq_id: int, reason: FinishReason, now: float, *, error: str | None = None) -> RequestOutput | None:
        """End a request from outside (client gone, step failed); None if it has ended already."""
        state = self._requests.get(seq_id)
        if state is None:
            return None
        text = state.stop_matcher.push(state.detokenizer.flush()).text_to_emit + state.stop_matcher.flush().text_to_emit
        times = self._close(state, reason, now)
        return RequestOutput(
            request_id=state.seq.request_id,
            text=text,
            token_ids=[],
            finish_reason=reason,
            usage=_usage(state),
            error=error,
            times=times,
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

    def _close(self, state: RequestState, reason: FinishReason, now: float) -> RequestTimes:
        del self._requests[state.seq.seq_id]
        return self._meter.note_end(state.moments, reason, now)


def _usage(state: RequestState) -> Usage:
    return Usage(
        prompt_tokens=state.seq.num_prompt_tokens,
        completion_tokens=state.num_output_tokens,
        cached_tokens=state.seq.num_cached_tokens or 0,
    )
