"""Counters of an engine, as plain data.

Owns what is counted and the rules that tie the counts together. Refuses to know Prometheus: `server.prometheus` reads
snapshots. The engine thread is the only writer; readers take `EngineStats` snapshots that are never changed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


@dataclass(slots=True)
class Histogram:
    """A histogram that a collector can export: counts per bucket (last one is +Inf), sum and count."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, *, times: int = 1) -> None:
        """Count `value`, `times` over (inter-token latency is observed once per token of a step)."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        """A snapshot that later observations do not touch."""
        return Histogram(self.bounds, list(self.counts), self.total)


@dataclass(slots=True)
class SpecDecodeStats:
    """What speculation did. `num_drafts` counts verified proposals, so mean acceptance length = 1 + accepted/drafts."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    @classmethod
    def for_depth(cls, num_speculative_tokens: int) -> SpecDecodeStats:
        """Zeroed counters with every position present, so that series exist from the start."""
        return cls(num_accepted_tokens_per_pos=[0] * num_speculative_tokens)

    def observe(self, *, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified proposal of `num_draft_tokens` drafts."""
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1

    def copy(self) -> SpecDecodeStats:
        """A snapshot that later observations do not touch."""
        return SpecDecodeStats(
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            list(self.num_accepted_tokens_per_pos),
        )


@dataclass(slots=True, kw_only=True)
class PrefixCacheStats:
    """Tokens looked up in the prefix cache, and tokens found."""

    queries: int = 0
    hits: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine: gauges of now, counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0..1, share of blocks in use by sequences
    num_kv_blocks: int = 0
    block_size: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    last_step_time: float = 0.0  # time.monotonic() seconds of the last finished step
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    requests_by_reason: dict[str, int] = field(default_factory=dict)  # finish reason -> count
    spec_decode: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    time_to_first_token_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    inter_token_latency_s: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    e2e_request_latency_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS_S))
    queue_time_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS_S))
