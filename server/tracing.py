"""Spans for OpenTelemetry: one of each HTTP request that may make work, and in it one of each answer.

Owns their names and attributes (OpenTelemetry's conventions for HTTP and generative AI) and where they are sent. Their
parent is what the client says in the W3C header `traceparent`. The packages are an extra, imported only when there is
somewhere to send spans to. Refuses to know what requests ask for: no prompt and no answer is in a span.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle import RequestOutput, __version__
from peagle.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

FLUSH_MS = 3000  # how long the last spans may take to be sent when the server stops
_PROVIDER = "peagle"
_NS = 1_000_000_000


class Tracing:
    """Makes spans of one server.

    Args:
        provider: where they go.
        model: the name that clients call the model by, if it is known.
    """

    def __init__(self, provider: TracerProvider, *, model: str | None) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(_PROVIDER, __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def begin(self, scope: Scope) -> Span:
        """The span of an HTTP request."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(dict(Headers(scope=scope)))
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        name = f"{scope['method']} {scope['path']}"
        return self._tracer.start_span(name, context=context, kind=SpanKind.SERVER, attributes=attributes)

    def answer(self, parent: Span, output: RequestOutput) -> None:
        """The span of an answer that has ended, from its arrival on."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        ended_at = time.time_ns()
        times, usage, spec = output.times, output.usage, output.spec_stats
        started_at = ended_at if times is None else ended_at - int(times.total_s * _NS)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "generate",
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.response.id": output.request_id,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
        if self._model is not None:
            attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = self._model
        if output.finish_reason is not None:
            attributes["gen_ai.response.finish_reasons"] = [output.finish_reason.value]
        if spec is not None:
            attributes["peagle.draft_tokens"] = spec.num_draft_tokens
            attributes["peagle.accepted_tokens"] = spec.num_accepted_tokens
        span = self._tracer.start_span(
            "generate",
            context=set_span_in_context(parent),
            kind=SpanKind.INTERNAL,
            start_time=started_at,
            attributes=attributes,
        )
        if times is not None:
            for name, seconds in (("scheduled", times.queue_s), ("first token", times.first_token_s)):
                if seconds is not None:
                    span.add_event(name, timestamp=started_at + int(seconds * _NS))
        if output.error is not None:
            span.set_status(Status(StatusCode.ERROR, output.error))
        span.end(ended_at)

    def shutdown(self) -> None:
        """Send what is left."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


current_span: ContextVar[tuple[Tracing, Span] | None] = ContextVar("current_span", default=None)


def trace_answer(output: RequestOutput) -> None:
    """A request of the engine has ended, in the context of its HTTP request."""
    current = current_span.get()
    if current is not None:
        tracing, span = current
        tracing.answer(span, output)


def create_tracing(endpoint: str | None, *, model: str | None) -> Tracing | None:
    """Tracing to an OTLP collector over HTTP, such as `http://localhost:4318/v1/traces`; None without one.

    Raises:
        ConfigError: the packages are not installed.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry: install peagle[tracing]") from error
    resource = Resource.create({"service.name": _PROVIDER, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider, model=model)


class TraceMiddleware:
    """Gives each request that may make work its span."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self.app = app
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        span = self.tracing.begin(scope)
        token = current_span.set((self.tracing, span))

        async def send_and_look(message: Message) -> None:
            if message["type"] == "http.response.start":
                _note_status(span, message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_and_look)
        finally:
            current_span.reset(token)
            span.end()


def _note_status(span: Span, status: int) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
