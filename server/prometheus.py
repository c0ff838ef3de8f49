"""The engine's counters as Prometheus metrics, under the names that vLLM made common.

Owns names, labels and help texts; dashboards, autoscalers and gateways read these names as they are. Reads a snapshot
of `EngineStats` at each scrape, so nothing is counted twice and the engine knows nothing of Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from peagle import EngineStats, FinishReason
from server.engine_bundle import EngineBundle

LABELS = ("model_name", "engine")
ENGINE_INDEX = "0"  # one engine a process; vLLM numbers them


class Histogram(Protocol):
    """What is read of a histogram: counts per bucket (one more than there are bounds) and the sum of all values."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float


_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests that are being computed.", lambda s: s.num_running),
    ("num_requests_waiting", "Requests that wait to be computed.", lambda s: s.num_waiting),
    ("kv_cache_usage_perc", "Share of the KV cache's blocks in use by requests, 0 to 1.", lambda s: s.kv_cache_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens of admitted requests.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("num_preemptions", "Times a request gave up its KV cache for others.", lambda s: s.num_preemptions),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.prefix_cache.queries),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.prefix_cache.hits),
    ("spec_decode_num_drafts", "Verified proposals of the drafter.", lambda s: s.spec_decode.num_drafts),
    ("spec_decode_num_draft_tokens", "Draft tokens verified.", lambda s: s.spec_decode.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda s: s.spec_decode.num_accepted_tokens),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineStats], Histogram]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", lambda s: s.time_to_first_token_s),
    (
        "inter_token_latency_seconds",
        "Between tokens; those of one step share its time.",
        lambda s: s.inter_token_latency_s,
    ),
    ("e2e_request_latency_seconds", "From arrival to the last token.", lambda s: s.e2e_request_latency_s),
    ("request_queue_time_seconds", "From arrival to being computed.", lambda s: s.queue_time_s),
)


class EngineCollector(Collector):
    """Yields the metrics of one engine; none while it is loading.

    Args:
        get_bundle: the engine, once there is one.
        get_model_name: the value of the label `model_name`.
    """

    def __init__(
        self, *, get_bundle: Callable[[], EngineBundle | None], get_model_name: Callable[[EngineBundle], str]
    ) -> None:
        self._get_bundle = get_bundle
        self._get_model_name = get_model_name

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the engine is there; without this, registering would collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Read one snapshot."""
        bundle = self._get_bundle()
        if bundle is not None:
            yield from engine_metrics(bundle.engine.stats(), model_name=self._get_model_name(bundle))


def engine_metrics(stats: EngineStats, *, model_name: str) -> Iterator[Metric]:
    """All metrics of a snapshot. Every series exists from the start, at 0, so that rates are defined."""
    labels = (model_name, ENGINE_INDEX)
    for name, text, read in _GAUGES:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        gauge.add_metric(labels, read(stats))
        yield gauge
    for name, text, read in _COUNTERS:
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        counter.add_metric(labels, read(stats))
        yield counter
    for name, text, read_histogram in _HISTOGRAMS:
        yield _histogram(name, text, read_histogram(stats), labels)
    yield _request_success(stats, labels)
    yield _accepted_per_position(stats, labels)
    yield _cache_config(stats, labels)


def _histogram(name: str, text: str, histogram: Histogram, labels: tuple[str, ...]) -> Metric:
    family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
    bounds = [*map(str, histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total)
    return family


def _request_success(stats: EngineStats, labels: tuple[str, ...]) -> Metric:
    family = CounterMetricFamily(
        "vllm:request_success", "Finished requests, by the reason of their end.", labels=(*LABELS, "finished_reason")
    )
    for reason in FinishReason:
        family.add_metric((*labels, reason.value), stats.requests_by_reason.get(reason.value, 0))
    return family


def _accepted_per_position(stats: EngineStats, labels: tuple[str, ...]) -> Metric:
    family = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by their position in the proposal.",
        labels=(*LABELS, "position"),
    )
    for position, count in enumerate(stats.spec_decode.num_accepted_tokens_per_pos):
        family.add_metric((*labels, str(position)), count)
    return family


def _cache_config(stats: EngineStats, labels: tuple[str, ...]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:cache_config_info",
        "The KV cache's shape, as labels of a constant 1.",
        labels=(*LABELS, "block_size", "num_gpu_blocks"),
    )
    family.add_metric((*labels, str(stats.block_size), str(stats.num_kv_blocks)), 1)
    return family


def create_registry(collector: EngineCollector) -> CollectorRegistry:
    """A registry of its own for each app, with the process's memory and CPU time."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
