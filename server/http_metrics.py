"""What HTTP requests there were: counts, times and refusals, under the names that others made common.

Owns the metrics and one pure ASGI layer, which looks at each request twice, and at no chunk. Labels are bounded: the
handler is the route's own path, never what a client wrote. Refuses to know what requests are about.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BUCKETS_S = (0.1, 0.5, 1.0, 5.0, 30.0, 120.0)
_UNCOUNTED = frozenset({"/health", "/ready", "/metrics", "/ping", "/version", "/load"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ROUTE = "none"
_REFUSALS = (
    "server_overloaded",
    "queue_timeout",
    "rate_limit_exceeded",
    "model_loading",
    "server_shutting_down",
)  # of more work; other reasons may be added


class HttpMetrics:
    """Counters of one app.

    Args:
        registry: where they are found.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests_total",
            "Requests that were answered, by the first digit of the status.",
            ("method", "handler", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From the whole head of a request to the end of its answer.",
            ("method", "handler"),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._refusals = Counter(
            "vllm:admission_rejections",
            "Requests that were refused because there was too much to do, or no engine to do it; by the error's code.",
            ("reason",),
            registry=registry,
        )
        for reason in _REFUSALS:
            self._refusals.labels(reason)

    def count_request(self, *, method: str, handler: str, status: int, duration_s: float) -> None:
        """A request is over. `status` 0: its client went away before there was one."""
        group = f"{status // 100 or 4}xx"
        known = method if method in _METHODS else "other"
        self._requests.labels(known, handler, group).inc()
        self._seconds.labels(known, handler).observe(duration_s)

    def count_refusal(self, reason: str) -> None:
        """A request was refused with 429 or 503. `reason` is one of a few words: the code of the error."""
        self._refusals.labels(reason).inc()


class HttpMetricsMiddleware:
    """Counts every request that is not a probe's or a scraper's."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNCOUNTED:
            await self.app(scope, receive, send)
            return
        status, started_at = 0, time.monotonic()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting_status)
        finally:
            route = scope.get("route")  # set by the router, once it has found one
            self.metrics.count_request(
                method=scope["method"],
                handler=getattr(route, "path", _NO_ROUTE),
                status=status,
                duration_s=time.monotonic() - started_at,
            )
