"""What is measured of a request between its arrival and its end.

Owns the moments of a request and which of them make which observation. Refuses to know text, and where a request
stands: the output processor says when something happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peagle.outputs import RequestSpecStats, RequestTimes, SequenceCommit
from peagle.sequence import FinishReason, Sequence
from peagle.stats import EngineStats, SpecDecodeStats


@dataclass(slots=True, kw_only=True)
class RequestMoments:
    """Of one request, as `time.monotonic()` seconds; None: it has not happened. Written by `RequestMeter` only."""

    seq: Sequence
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    spec: SpecDecodeStats = field(default_factory=SpecDecodeStats)

    @property
    def spec_stats(self) -> RequestSpecStats | None:
        """What speculation did for it so far; None if it never ran."""
        if self.first_scheduled is None:
            return None
        return RequestSpecStats(
            num_drafts=self.spec.num_drafts,
            num_draft_tokens=self.spec.num_draft_tokens,
            num_accepted_tokens=self.spec.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(self.spec.num_accepted_tokens_per_pos),
        )


class RequestMeter:
    """Turns what happens to requests into counts.

    Args:
        stats: counters to write; the engine thread is the only writer.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        for reason in FinishReason:
            stats.requests_by_reason.setdefault(reason.value, 0)

    def note_scheduled(self, moments: RequestMoments, now: float) -> None:
        """It is in the step that is about to run. Only the first time counts: it ends the time in the queue."""
        if moments.first_scheduled is not None:
            return
        moments.first_scheduled = now
        self._stats.queue_time_s.observe(now - moments.seq.arrival_time)
        self._stats.prompt_tokens += moments.seq.num_prompt_tokens
        self._stats.cached_prompt_tokens += moments.seq.num_cached_tokens or 0

    def note_committed(self, moments: RequestMoments, commit: SequenceCommit) -> None:
        """A step has committed something for it."""
        moments.spec.observe(
            num_draft_tokens=commit.num_draft_tokens,
            num_accepted_tokens=commit.num_accepted_tokens,
            draft_parents=commit.draft_parents,
        )

    def note_tokens(self, moments: RequestMoments, num_tokens: int, now: float) -> None:
        """Its client gets `num_tokens` more tokens, 0 for none."""
        if num_tokens == 0:
            return
        self._stats.generation_tokens += num_tokens
        moments.num_tokens += num_tokens
        if moments.last_token is None:
            self._stats.time_to_first_token_s.observe(now - moments.seq.arrival_time)
            moments.first_token = now
        else:
            # Tokens of one step arrive together; each is charged its share of the wait.
            self._stats.inter_token_latency_s.observe((now - moments.last_token) / num_tokens, times=num_tokens)
        moments.last_token = now

    def note_end(self, moments: RequestMoments, reason: FinishReason, now: float) -> RequestTimes:
        """It has ended, for whatever reason. Times that it never had are not observed."""
        seq = moments.seq
        self._stats.requests_by_reason[reason.value] += 1
        self._stats.e2e_request_latency_s.observe(now - seq.arrival_time)
        observed = self._stats.requests
        observed.num_prompt_tokens.observe(seq.num_prompt_tokens)
        observed.num_generation_tokens.observe(moments.num_tokens)
        observed.num_preemptions.observe(seq.num_preemptions)
        if seq.params.max_tokens is not None:
            observed.max_tokens.observe(seq.params.max_tokens)
        if moments.first_scheduled is not None:
            observed.inference_time_s.observe(now - moments.first_scheduled)
            observed.num_prefill_computed_tokens.observe(seq.num_prompt_tokens - (seq.num_cached_tokens or 0))
        self._observe_tokens(moments)
        return RequestTimes(
            queue_s=_since(seq.arrival_time, moments.first_scheduled),
            first_token_s=_since(seq.arrival_time, moments.first_token),
            total_s=now - seq.arrival_time,
        )

    def _observe_tokens(self, moments: RequestMoments) -> None:
        """How long its prompt and its tokens took, and what a verified proposal yielded."""
        if moments.first_scheduled is None or moments.first_token is None or moments.last_token is None:
            return
        observed = self._stats.requests
        decode_s = moments.last_token - moments.first_token
        observed.prefill_time_s.observe(moments.first_token - moments.first_scheduled)
        observed.decode_time_s.observe(decode_s)
        if moments.num_tokens > 1:
            observed.time_per_output_token_s.observe(decode_s / (moments.num_tokens - 1))
        if moments.spec.num_drafts:
            observed.acceptance_length.observe(1 + moments.spec.num_accepted_tokens / moments.spec.num_drafts)


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start
