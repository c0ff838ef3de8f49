"""The engine's metrics as objects of prometheus_client, and the registry of everything else.

Owns the labels that all of the engine's metrics have. `engine_metrics` is the obvious way from the table to samples;
`metrics_page` writes the same text in a tenth of the time, and a test compares the two. Refuses to know what is counted
(`engine_metrics`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from peagle.stats import Histogram
from server.engine_metrics import ENGINE_METRICS, EngineMetric, Snapshot

LABELS = ("model_name", "engine")
ENGINE_INDEX = "0"  # one engine a process; vLLM numbers them


def engine_metrics(snapshot: Snapshot, *, model_name: str) -> Iterator[Metric]:
    """All metrics of a snapshot. Every series exists from the start, at 0, so that rates are defined."""
    for metric in ENGINE_METRICS:
        yield _family(metric, snapshot, (model_name, ENGINE_INDEX))


def _family(metric: EngineMetric, snapshot: Snapshot, labels: tuple[str, ...]) -> Metric:
    names = (*LABELS, *metric.labels)
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.text, labels=names)
        for values, reading in metric.read(snapshot):
            assert isinstance(reading, Histogram)
            histograms.add_metric((*labels, *values), _buckets(reading), reading.total)
        return histograms
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    numbers = kind(metric.name, metric.text, labels=names)
    for values, reading in metric.read(snapshot):
        assert not isinstance(reading, Histogram)
        numbers.add_metric((*labels, *values), reading)
    return numbers


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def create_registry(*collectors: Collector) -> CollectorRegistry:
    """A registry of its own for each app, with the process's memory and CPU time."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
