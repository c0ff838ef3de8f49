"""Metrics of the process around the engine: there from the first moment.

Owns their names. They read the lifecycle's own state at each scrape. Refuses to know the engine's (`engine_metrics`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import peagle
from server.lifespan import Lifecycle, ServerStatus


class LifecycleCollector(Collector):
    """Whether requests are taken, how long the start took, and which version this is."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def describe(self) -> Iterable[Metric]:
        """Names alone; without this, registering would collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Read the state."""
        readiness = self._lifecycle.readiness()
        yield InfoMetricFamily("peagle_build", "The version that runs.", value={"version": peagle.__version__})
        status = GaugeMetricFamily(
            "peagle_status", "1 for the status that /ready reports, 0 for the others.", labels=("status",)
        )
        for name in ServerStatus:
            status.add_metric((name.value,), float(name is readiness.status))
        yield status
        startup = GaugeMetricFamily(
            "peagle_startup_seconds", "Seconds that a phase of the start took.", labels=("phase",)
        )
        for phase, seconds in readiness.phase_seconds.items():
            startup.add_metric((phase,), seconds)
        yield startup
        yield GaugeMetricFamily(
            "peagle_requests_under_way", "Requests that a shutdown would wait for.", value=self._lifecycle.num_active
        )
