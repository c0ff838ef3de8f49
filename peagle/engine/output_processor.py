"""From committed tokens to what clients get: text, finish reasons, usage, latencies.

Owns everything of a request that is about text and time, and the last word on where an answer ends: a stop string may
cut inside the tokens of one step, and then text, token ids and usage all end at the token that completed it. Refuses to
know scheduling; it tells the engine which sequences ended early.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from peagle.engine.predicted_usage import count_predicted
from peagle.engine.request_meter import RequestMeter, RequestMoments
from peagle.outputs import RequestOutput, SequenceCommit, TokenLogprobs, Usage
from peagle.sequence import FinishReason, Sequence
from peagle.stats import EngineStats, SpecDecodeStats
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
    # Of every token of the prompt, until they have been given out; the first one's is never known.
    prompt_logprobs: list[TokenLogprobs | None] | None = None


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
        self._num_speculative_tokens = stats.num_speculative_tokens
        self._requests: dict[int, RequestState] = {}

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def add(self, seq: Sequence) -> None:
        """Start a request."""
        params = seq.params
        self._requests[seq.seq_id] = RequestState(
            seq=seq,
            detokenizer=IncrementalDetokenizer(
                self._tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                visible_special_tokens=params.visible_special_tokens,
                prompt_tail_ids=seq.token_ids[-_PROMPT_TAIL:],
            ),
            stop_matcher=StopMatcher(params.stop),
            moments=RequestMoments(seq=seq, spec=SpecDecodeStats.for_depth(self._num_speculative_tokens)),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * seq.num_prompt_tokens,
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
            _keep_prompt_logprobs(state, commit)
            if not commit.new_token_ids:  # a chunk of the prompt, which says nothing yet
                continue
            output = self._advance(state, commit)
            self._meter.note_tokens(state.moments, len(output.token_ids), now)
            if output.finish_reason is not None:
                if commit.finish_reason is None:
                    step.stopped_seq_ids.append(commit.seq_id)
                output = self._close(state, output, now)
            step.outputs.append(output)
        return step

    def end(self, seq_id: int, reason: FinishReason, now: float, *, error: str | None = None) -> RequestOutput | None:
        """End a request from outside (client gone, step failed); None if it has ended already."""
        state = self._requests.get(seq_id)
        if state is None:
            return None
        text = state.stop_matcher.push(state.detokenizer.flush()).text_to_emit + state.stop_matcher.flush().text_to_emit
        last = self._output(state, [text], _nothing(state.seq), reason, None)
        return self._close(state, replace(last, error=error), now)

    def _advance(self, state: RequestState, commit: SequenceCommit) -> RequestOutput:
        token_ids = commit.new_token_ids
        params = state.seq.params
        is_stopped = commit.finish_reason is FinishReason.STOP
        # The token that ended the answer by its id counts as a token, but is not part of the text.
        num_spoken = len(token_ids) - (is_stopped and not params.include_stop_str_in_output)
        text: list[str] = []
        for count, token_id in enumerate(token_ids[:num_spoken], start=1):
            new_text = state.detokenizer.push(token_id)
            if state.num_output_tokens + count < params.min_tokens:
                text.append(new_text)
                continue
            matched = _watch(state, text, new_text)
            if matched is not None:
                return self._output(state, text, commit.first(count), FinishReason.STOP, matched)
        if commit.finish_reason is None:
            return self._output(state, text, commit, None, None)
        matched = _watch(state, text, state.detokenizer.flush())
        if matched is not None:  # completed by bytes that had been waiting for the rest of a character
            return self._output(state, text, commit, FinishReason.STOP, matched)
        text.append(state.stop_matcher.flush().text_to_emit)
        return self._output(state, text, commit, commit.finish_reason, token_ids[-1] if is_stopped else None)

    def _output(
        self,
        state: RequestState,
        text: list[str],
        commit: SequenceCommit,
        reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> RequestOutput:
        """Say `text` with the tokens of `commit`."""
        state.num_output_tokens += len(commit.new_token_ids)
        of_prompt, state.prompt_logprobs = state.prompt_logprobs, None
        return RequestOutput(
            request_id=state.seq.request_id,
            text="".join(text),
            token_ids=list(commit.new_token_ids),
            finish_reason=reason,
            usage=_usage(state),
            stop_reason=stop_reason,
            logprobs=None if state.seq.params.logprobs is None else tuple(commit.logprobs),
            prompt_logprobs=of_prompt if commit.new_token_ids else None,
        )

    def _close(self, state: RequestState, last: RequestOutput, now: float) -> RequestOutput:
        """The last output with all that is known of a request once it has ended."""
        assert last.finish_reason is not None
        del self._requests[state.seq.seq_id]
        spec_stats = state.moments.spec_stats
        times = self._meter.note_end(state.moments, last.finish_reason, now)
        return replace(last, usage=_final_usage(state), times=times, spec_stats=spec_stats)


def _nothing(seq: Sequence) -> SequenceCommit:
    return SequenceCommit(seq_id=seq.seq_id, request_id=seq.request_id, new_token_ids=(), finish_reason=None)


def _watch(state: RequestState, text: list[str], new_text: str) -> str | None:
    """Append what is certain of the new text; the stop string that it completed, if any."""
    result = state.stop_matcher.push(new_text)
    text.append(result.text_to_emit)
    if result.matched is not None and state.seq.params.include_stop_str_in_output:
        text.append(result.matched)
    return result.matched


def _keep_prompt_logprobs(state: RequestState, commit: SequenceCommit) -> None:
    """A preempted prompt is computed again, and then says the same again."""
    if state.prompt_logprobs is not None:
        end = commit.prompt_logprobs_start + len(commit.prompt_logprobs)
        state.prompt_logprobs[commit.prompt_logprobs_start : end] = commit.prompt_logprobs


def _final_usage(state: RequestState) -> Usage:
    predicted = state.seq.predicted_token_ids
    num_prompt = state.seq.num_prompt_tokens
    num_accepted = count_predicted(
        state.seq.token_ids[: num_prompt + state.num_output_tokens],
        num_prompt_tokens=num_prompt,
        predicted_token_ids=predicted,
    )
    return replace(
        _usage(state),
        accepted_prediction_tokens=num_accepted,
        rejected_prediction_tokens=len(predicted) - num_accepted,
    )


def _usage(state: RequestState) -> Usage:
    return Usage(
        prompt_tokens=state.seq.num_prompt_tokens,
        completion_tokens=state.num_output_tokens,
        cached_tokens=state.seq.num_cached_tokens or 0,
    )
