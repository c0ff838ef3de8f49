"""The text of `/metrics`, in the format that every scraper takes.

Gateways ask for it twenty times a second, from the event loop that also writes every stream. Of the engine's 500 lines
only the numbers change, so everything before the number is made once; and whoever asks more than twice in a second
gets the last page again, at most a second old. Owns this text, and the short way to it. Refuses to know what is
exported (`engine_metrics`), and to lock anything: it reads a snapshot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.stats import Histogram
from server.engine_bundle import EngineBundle
from server.engine_metrics import ENGINE_METRICS, EngineMetric, Snapshot
from server.guard import METRICS_PATH
from server.prometheus import ENGINE_INDEX, LABELS

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

MAX_PAGES_PER_S = 2  # each takes a few milliseconds, in which no stream is written


class MetricsPage:
    """Everything that `/metrics` says: of the engine once there is one, and of the process.

    Args:
        registry: what is not the engine's.
        get_bundle: the engine, once it is loaded.
        get_model_name: the value of the label `model_name`.
        get_num_waiting: requests that wait outside of the engine.
        clock: seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        get_bundle: Callable[[], EngineBundle | None],
        get_model_name: Callable[[EngineBundle], str],
        get_num_waiting: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._get_bundle = get_bundle
        self._get_model_name = get_model_name
        self._get_num_waiting = get_num_waiting
        self._clock = clock
        self._text: EngineText | None = None
        self._made_at: deque[float] = deque(maxlen=MAX_PAGES_PER_S)
        self._latest = b""

    def render(self) -> bytes:
        """The page as it is now, or as it was a moment ago."""
        now = self._clock()
        if len(self._made_at) < MAX_PAGES_PER_S or now - self._made_at[0] >= 1.0:
            self._made_at.append(now)
            self._latest = self._make()
        return self._latest

    def _make(self) -> bytes:
        rest = generate_latest(self._registry)
        bundle = self._get_bundle()
        if bundle is None:
            return rest
        if self._text is None:
            self._text = EngineText(self._get_model_name(bundle))
        engine = bundle.engine
        stats = engine.stats()
        stats = replace(stats, num_waiting=stats.num_waiting + self._get_num_waiting())
        return self._text.render(Snapshot(stats, engine.health())).encode() + rest


class ScrapeMiddleware:
    """Answers scrapes before anything else looks at them.

    Between two steps the caches of the processor hold weights, so what an ordinary request runs through (routes,
    dependencies, ids, limits) costs a millisecond, and decoding waits for it. A scrape needs none of it.

    Args:
        app: answers everything else.
        page: what is scraped.
    """

    def __init__(self, app: ASGIApp, *, page: MetricsPage) -> None:
        self.app = app
        self.page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != METRICS_PATH or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        page = self.page.render()
        headers = [(b"content-type", CONTENT_TYPE), (b"content-length", b"%d" % len(page))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})


class EngineText:
    """The engine's part. Keeps the beginning of every line that it has ever written.

    Args:
        model_name: the value of the label.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = dict(zip(LABELS, (model_name, ENGINE_INDEX), strict=True))
        self._headers = [_header(metric) for metric in ENGINE_METRICS]
        self._heads: dict[tuple[str, tuple[str, ...]], list[str]] = {}

    def render(self, snapshot: Snapshot) -> str:
        """All metrics of a snapshot."""
        lines: list[str] = []
        for metric, header in zip(ENGINE_METRICS, self._headers, strict=True):
            lines.append(header)
            for values, reading in metric.read(snapshot):
                heads = self._heads.get((metric.name, values))
                if heads is None:
                    heads = self._heads[metric.name, values] = self._make_heads(metric, values, reading)
                if not isinstance(reading, Histogram):
                    lines.append(f"{heads[0]}{reading}\n")
                    continue
                cumulative = list(accumulate(reading.counts))
                lines += [f"{head}{count}\n" for head, count in zip(heads, cumulative, strict=False)]
                lines.append(f"{heads[-2]}{cumulative[-1]}\n{heads[-1]}{reading.total}\n")
        return "".join(lines)

    def _make_heads(self, metric: EngineMetric, values: tuple[str, ...], reading: float | Histogram) -> list[str]:
        """Of a histogram: one for each bucket, then those of count and sum."""
        labels = self._labels | dict(zip(metric.labels, values, strict=True))
        if not isinstance(reading, Histogram):
            return [_head(metric.name + ("_total" if metric.kind == "counter" else ""), labels)]
        bounds = [*(str(float(bound)) for bound in reading.bounds), "+Inf"]
        buckets = [_head(f"{metric.name}_bucket", labels | {"le": bound}) for bound in bounds]
        return [*buckets, _head(f"{metric.name}_count", labels), _head(f"{metric.name}_sum", labels)]


def _header(metric: EngineMetric) -> str:
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    return f"# HELP {name} {metric.text}\n# TYPE {name} {metric.kind}\n"


def _head(name: str, labels: dict[str, str]) -> str:
    pairs = ",".join(f'{label}="{_escape(labels[label])}"' for label in sorted(labels))
    return f"{name}{{{pairs}}} "


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
