"""What was seen, and the numbers that follow from it.

Owns the definitions of TTFT, TPOT, inter-chunk latency, E2E latency and tokens/s. Pure: refuses to know HTTP, clocks
and output formats. All times are seconds.

A speculating server sends several tokens in one chunk, so the gap between chunks is what a reader feels but says
nothing about tokens. Per-token time is therefore taken from the token count in `usage`:
TPOT = (last content chunk - first content chunk) / (completion tokens - 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class FailureKind(StrEnum):
    """Why a request does not count as answered."""

    CONNECTION = "connection"  # refused, reset, or cut before the end
    TIMEOUT = "timeout"
    HTTP_STATUS = "http_status"  # anything but 200
    NOT_A_STREAM = "not_a_stream"  # 200, but no text/event-stream
    BAD_EVENT = "bad_event"  # an event that is not a chat.completion.chunk
    ERROR_EVENT = "error_event"
    MISSING_DONE = "missing_done"
    MISSING_FINISH_REASON = "missing_finish_reason"
    NO_USAGE = "no_usage"
    ZERO_TOKENS = "zero_tokens"  # none by usage, or no text in any chunk


@dataclass(frozen=True)
class Failure:
    """One failed request: what kind, and what was seen."""

    kind: FailureKind
    detail: str


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it. Times come from one monotonic clock."""

    started_s: float
    finished_s: float  # arrival of [DONE], or the moment of failure
    chunk_times_s: tuple[float, ...] = ()  # arrival of each chunk that carries text
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    text: str = ""
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first chunk with text (an empty role chunk is no token)."""
        return self.chunk_times_s[0] - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token. See the module docstring."""
        if self.completion_tokens < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.completion_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time from sending to [DONE]."""
        return self.finished_s - self.started_s

    @property
    def inter_chunk_s(self) -> list[float]:
        """Gaps between chunks with text."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A sample in a few numbers."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Describe `values`; None when there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            count=len(ordered),
            mean=sum(ordered) / len(ordered),
            min=ordered[0],
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )


@dataclass(frozen=True, kw_only=True)
class Round:
    """One pass over the prompts at one concurrency."""

    records: tuple[RequestRecord, ...]  # by prompt index
    warm_up: tuple[RequestRecord, ...] = ()  # not measured, but failures there are failures too
    wall_s: float
    client_cpu_s: float = 0.0  # processor time that this client took during `wall_s`

    @property
    def answered(self) -> list[RequestRecord]:
        """The measured requests that did not fail."""
        return [record for record in self.records if record.failure is None]

    @property
    def failures(self) -> list[Failure]:
        """All failures, those of the warm-up included."""
        return [record.failure for record in (*self.warm_up, *self.records) if record.failure is not None]

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens of answered requests by `usage`, over the wall time."""
        return sum(record.completion_tokens for record in self.answered) / self.wall_s


@dataclass(frozen=True, kw_only=True)
class LoadSummary:
    """One server at one concurrency, all rounds together. Failed requests cost wall time and add nothing else."""

    num_requests: int
    num_failed: int
    num_warm_up_failed: int
    wall_s: float
    prompt_tokens: int
    completion_tokens: int
    tokens_per_s: float
    tokens_per_s_by_round: list[float]
    requests_per_s: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    inter_chunk_s: Distribution | None
    e2e_s: Distribution | None
    output_tokens: Distribution | None  # lengths of the answers
    tokens_per_chunk: float | None
    finish_reasons: dict[str, int]
    client_cpu_share: float  # near 1.0 the client is what was measured


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile of ascending values, interpolated linearly between the two nearest ranks."""
    assert ordered, "a percentile of nothing"
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(rounds: Sequence[Round]) -> LoadSummary:
    """Pool the rounds of one server at one concurrency."""
    answered = [record for part in rounds for record in part.answered]
    num_requests = sum(len(part.records) for part in rounds)
    wall_s = sum(part.wall_s for part in rounds)
    completion_tokens = sum(record.completion_tokens for record in answered)
    num_chunks = sum(len(record.chunk_times_s) for record in answered)
    return LoadSummary(
        num_requests=num_requests,
        num_failed=num_requests - len(answered),
        num_warm_up_failed=sum(record.failure is not None for part in rounds for record in part.warm_up),
        wall_s=wall_s,
        prompt_tokens=sum(record.prompt_tokens for record in answered),
        completion_tokens=completion_tokens,
        tokens_per_s=completion_tokens / wall_s,
        tokens_per_s_by_round=[part.tokens_per_s for part in rounds],
        requests_per_s=len(answered) / wall_s,
        ttft_s=Distribution.of(record.ttft_s for record in answered),
        tpot_s=Distribution.of(record.tpot_s for record in answered if record.tpot_s is not None),
        inter_chunk_s=Distribution.of(gap for record in answered for gap in record.inter_chunk_s),
        e2e_s=Distribution.of(record.e2e_s for record in answered),
        output_tokens=Distribution.of(record.completion_tokens for record in answered),
        tokens_per_chunk=completion_tokens / num_chunks if num_chunks else None,
        finish_reasons=dict(Counter(str(record.finish_reason) for record in answered)),
        client_cpu_share=sum(part.client_cpu_s for part in rounds) / wall_s,
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Server A over server B at one concurrency, both measured in turn in the same run."""

    concurrency: int
    tokens_per_s_ratio: float | None  # above 1: A is faster
    tokens_per_s_ratio_by_round: list[float | None]  # their spread is the noise of this run
    ttft_p50_ratio: float | None  # below 1: A is faster
    tpot_p50_ratio: float | None
    e2e_p50_ratio: float | None
    num_compared_outputs: int
    num_equal_outputs: int  # answers with the same text from both


def compare(rounds_a: Sequence[Round], rounds_b: Sequence[Round], *, concurrency: int) -> Comparison:
    """Ratios A/B. Round i of A ran right before round i of B, over the same prompts."""
    a, b = summarize(rounds_a), summarize(rounds_b)
    pairs = [
        (mine, other)
        for round_a, round_b in zip(rounds_a, rounds_b, strict=True)
        for mine, other in zip(round_a.records, round_b.records, strict=True)
        if mine.failure is None and other.failure is None
    ]
    return Comparison(
        concurrency=concurrency,
        tokens_per_s_ratio=_ratio(a.tokens_per_s, b.tokens_per_s),
        tokens_per_s_ratio_by_round=[
            _ratio(mine, other) for mine, other in zip(a.tokens_per_s_by_round, b.tokens_per_s_by_round, strict=True)
        ],
        ttft_p50_ratio=_median_ratio(a.ttft_s, b.ttft_s),
        tpot_p50_ratio=_median_ratio(a.tpot_s, b.tpot_s),
        e2e_p50_ratio=_median_ratio(a.e2e_s, b.e2e_s),
        num_compared_outputs=len(pairs),
        num_equal_outputs=sum(mine.text == other.text for mine, other in pairs),
    )


def _median_ratio(a: Distribution | None, b: Distribution | None) -> float | None:
    return _ratio(a.p50, b.p50) if a and b else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
