"""Counters of an engine, as plain data.

Owns what is counted and the rules that tie the counts together. Refuses to know Prometheus: `server.engine_metrics`
reads snapshots. The engine thread is the only writer; readers take `EngineStats` snapshots that are never changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

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
STEP_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
ACCEPTANCE_LENGTH_BUCKETS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 11.0, 16.0)

NO_DRAFTER = "none"


def one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    sizes: list[int] = []
    decade = 1
    while decade <= largest:
        sizes += [factor * decade for factor in (1, 2, 5) if factor * decade <= largest]
        decade *= 10
    return tuple(sizes)


@dataclass(slots=True)
class Histogram:
    """A histogram that a collector can export: counts per bucket (last one is +Inf), sum and count."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    @property
    def num_observed(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

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
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)

    @classmethod
    def for_depth(cls, num_speculative_tokens: int) -> SpecDecodeStats:
        """Zeroed counters with every position present, so that series exist from the start."""
        return cls(
            num_accepted_tokens_per_pos=[0] * num_speculative_tokens,
            num_draft_tokens_per_pos=[0] * num_speculative_tokens,
        )

    def observe(
        self, *, num_draft_tokens: int, num_accepted_tokens: int, draft_parents: Sequence[int] | None = None
    ) -> None:
        """Count one verified proposal.

        Args:
            num_draft_tokens: drafts that were verified.
            num_accepted_tokens: those that stood.
            draft_parents: of each draft, its parent among the drafts (-1: none); None: they are a chain.
        """
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1
        for position in range(num_draft_tokens) if draft_parents is None else _depths(draft_parents):
            self.num_draft_tokens_per_pos[position] += 1

    def copy(self) -> SpecDecodeStats:
        """A snapshot that later observations do not touch."""
        return replace(
            self,
            num_accepted_tokens_per_pos=list(self.num_accepted_tokens_per_pos),
            num_draft_tokens_per_pos=list(self.num_draft_tokens_per_pos),
        )


def _depths(parents: Sequence[int]) -> list[int]:
    """How many ancestors each node of a tree has."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(slots=True, kw_only=True)
class PrefixCacheStats:
    """Tokens looked up in the prefix cache, and tokens found."""

    queries: int = 0
    hits: int = 0


@dataclass(slots=True, kw_only=True)
class GraphStats:
    """How the steps of a fixed-shape runner ran.

    Attributes:
        hits: replayed from a captured graph.
        misses: a shape was met for the first time and captured, for which everybody waited.
        eager: run as they came: without capture, or with a shape that no bucket has (a chunk of a prompt is in it).
    """

    hits: int = 0
    misses: int = 0
    eager: int = 0

    def reset(self) -> None:
        """Count from 0 again."""
        self.hits = self.misses = self.eager = 0

    def copy(self) -> GraphStats:
        """A snapshot that later observations do not touch."""
        return replace(self)


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """One observation for each request, when it ends."""

    inference_time_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS_S))
    prefill_time_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS_S))
    decode_time_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS_S))
    time_per_output_token_s: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    num_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(one_two_five(1)))
    num_generation_tokens: Histogram = field(default_factory=lambda: Histogram(one_two_five(1)))
    max_tokens: Histogram = field(default_factory=lambda: Histogram(one_two_five(1)))
    num_prefill_computed_tokens: Histogram = field(default_factory=lambda: Histogram(one_two_five(1)))
    num_preemptions: Histogram = field(default_factory=lambda: Histogram(PREEMPTIONS_BUCKETS))
    acceptance_length: Histogram = field(default_factory=lambda: Histogram(ACCEPTANCE_LENGTH_BUCKETS))

    @classmethod
    def up_to(cls, max_model_len: int) -> RequestStats:
        """With buckets for token counts up to the context's length."""
        sizes = one_two_five(max_model_len)
        return cls(
            num_prompt_tokens=Histogram(sizes),
            num_generation_tokens=Histogram(sizes),
            max_tokens=Histogram(sizes),
            num_prefill_computed_tokens=Histogram(sizes),
        )

    def copy(self) -> RequestStats:
        """A snapshot that later observations do not touch."""
        return RequestStats(**{f.name: getattr(self, f.name).copy() for f in fields(self)})


@dataclass(slots=True, kw_only=True)
class StepStats:
    """One observation for each step; `num_verified_drafts`: for each decoding sequence of a step, 0 included."""

    num_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS_BUCKETS))
    verify_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))  # target and verification
    draft_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))
    host_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))  # everything else
    num_verified_drafts: Histogram = field(default_factory=lambda: Histogram((0,)))

    @classmethod
    def for_depth(cls, num_speculative_tokens: int) -> StepStats:
        """With a bucket for every K."""
        return cls(num_verified_drafts=Histogram(tuple(range(num_speculative_tokens + 1))))

    def copy(self) -> StepStats:
        """A snapshot that later observations do not touch."""
        return StepStats(**{f.name: getattr(self, f.name).copy() for f in fields(self)})


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine: gauges of now, counters since the start, and a few constants."""

    num_running: int = 0
    num_waiting: int = 0
    num_with_head: int = 0  # running sequences that the draft head drafts for
    kv_cache_usage: float = 0.0  # 0..1, share of blocks in use by sequences
    num_kv_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    drafter: str = NO_DRAFTER  # who drafts, such as peagle+suffix
    num_speculative_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_corrupted_requests: int = 0  # whose hidden states or logits were no numbers
    num_steps: int = 0
    last_step_time: float = 0.0  # time.monotonic() seconds of the last finished step
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    requests_by_reason: dict[str, int] = field(default_factory=dict)  # finish reason -> count
    graphs: dict[str, GraphStats] = field(default_factory=dict)  # by who runs them: target, drafter
    spec_decode: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    steps: StepStats = field(default_factory=StepStats)
    requests: RequestStats = field(default_factory=RequestStats)
    time_to_first_token_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    inter_token_latency_s: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    e2e_request_latency_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS_S))
    queue_time_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS_S))

    def copy(self) -> EngineStats:
        """A snapshot that later observations do not touch."""
        return replace(
            self,
            prefix_cache=replace(self.prefix_cache),
            requests_by_reason=dict(self.requests_by_reason),
            graphs={name: stats.copy() for name, stats in self.graphs.items()},
            spec_decode=self.spec_decode.copy(),
            steps=self.steps.copy(),
            requests=self.requests.copy(),
            time_to_first_token_s=self.time_to_first_token_s.copy(),
            inter_token_latency_s=self.inter_token_latency_s.copy(),
            e2e_request_latency_s=self.e2e_request_latency_s.copy(),
            queue_time_s=self.queue_time_s.copy(),
        )
