"""The server as a whole: the app, and the process around it.

Owns assembly and the order of a start: listen, answer /health and /ready, load the model in a thread. Importing this
module does no work. Refuses to know routes (`api`) and the life of the engine (`lifespan`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

import peagle
from peagle import EngineConfig, PhaseListener
from peagle.errors import ConfigError, ModelLoadError
from peagle.text import AnswerFormat
from server.access import add_access, create_admission, end_request
from server.api import chat, completions, responses, tokenize
from server.api.router import create_router
from server.body_reads import BodyReads
from server.engine_bundle import EngineBundle, EngineStarter
from server.engine_report import EngineReport
from server.errors import install_handlers
from server.guard import TicketMiddleware
from server.http_metrics import HttpMetrics, HttpMetricsMiddleware
from server.http_protocol import HttpProtocol
from server.lifespan import Lifecycle, lifespan
from server.logging import configure_logging
from server.metrics_page import MetricsPage, ScrapeMiddleware
from server.middleware import BodyLimitMiddleware, RequestMiddleware
from server.process_metrics import LifecycleCollector
from server.prometheus import create_registry
from server.response_desk import ResponseDesk
from server.response_store import ResponseStore
from server.settings import ServerConfig, Settings
from server.tracing import TraceMiddleware, create_tracing

logger = logging.getLogger(__name__)

KEEP_CONNECTION_S = 65  # longer than the usual 60 s of load balancers, so that they and not we close idle connections
CLOSE_CONNECTIONS_S = 5
BACKLOG = 2048

# Read by torch's libraries when they are loaded; a variable that is set has the last word.
#
# How long an idle thread of torch's pool spins before it sleeps, for OpenMP to read when torch is imported. The default
# spins for milliseconds: as fast on a quiet machine, but one other busy process then makes every barrier wait for a
# thread that has lost its core to a spinning one (docs/log.md, 2026-12-01).
# MKL may round differently depending on how a buffer is aligned, unless told to be reproducible; without that, who else
# is in a batch shows in a row's last bits (`peagle.attention.sdpa`).
LIBRARY_SETTINGS = {"GOMP_SPINCOUNT": "3000", "MKL_CBWR": "AUTO"}


class PeagleApp(FastAPI):
    """FastAPI, with the schemas of bodies that our own dependency reads."""

    def openapi(self) -> dict[str, Any]:
        """The API's description."""
        schema = super().openapi()
        known = schema.setdefault("components", {}).setdefault("schemas", {})
        for body in (chat.BODY, completions.BODY, responses.BODY, tokenize.TOKENIZE_BODY, tokenize.DETOKENIZE_BODY):
            known.update(body.definitions)
        return schema


def create_app(settings: Settings, start_engine: EngineStarter) -> FastAPI:
    """The ASGI app of one server. `start_engine` is called once, in a thread, when the app starts up."""
    app = PeagleApp(title="peagle", version=peagle.__version__, lifespan=lifespan, redirect_slashes=False)
    lifecycle = Lifecycle(settings.server, start_engine)
    names = settings.server.served_model_name
    body_reads = BodyReads(timeout_s=settings.server.request_body_timeout_s)
    registry = create_registry(LifecycleCollector(lifecycle))
    http_metrics = HttpMetrics(registry)
    app.state.settings = settings
    app.state.lifecycle = lifecycle
    app.state.body_reads = body_reads
    app.state.http_metrics = http_metrics
    app.state.metrics_registry = registry
    admission = create_admission(settings, lifecycle)
    app.state.admission = admission
    app.state.metrics_page = MetricsPage(
        registry,
        get_bundle=lambda: lifecycle.bundle,
        get_num_waiting=lambda: admission.num_waiting,
        get_model_name=lambda bundle: names[0] if names else bundle.model_id,
    )
    app.state.engine_report = EngineReport(lambda: lifecycle.bundle, interval_s=settings.server.stats_interval_s)
    app.state.response_desk = ResponseDesk(ResponseStore(settings.server.max_stored_response_bytes))
    app.state.created_at = int(time.time())
    app.include_router(create_router())
    install_handlers(app)
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=settings.server.max_body_bytes, reads=body_reads)
    app.add_middleware(TicketMiddleware, admission=admission)
    add_access(app, settings.server)
    tracing = app.state.tracing = create_tracing(
        settings.server.otlp_traces_endpoint, model=None if names is None else names[0]
    )
    if tracing is not None:
        app.add_middleware(TraceMiddleware, tracing=tracing)
    app.add_middleware(RequestMiddleware)  # outside of the limits: refused bodies get an id and a log line
    app.add_middleware(HttpMetricsMiddleware, metrics=http_metrics)  # added last, so it is outermost: it sees every end
    if not settings.server.metrics_need_key:
        app.add_middleware(ScrapeMiddleware, page=app.state.metrics_page)
    return app


def loader_starter(config: EngineConfig, server: ServerConfig) -> EngineStarter:
    """The starter of the real engine. torch is imported when it is called, in the loading thread."""

    def start(on_phase: PhaseListener) -> EngineBundle:
        loaded = peagle.load_engine(config, on_phase)
        # The modules behind a model are a large graph that never dies; collections that walk it would pause everyone.
        gc.freeze()
        return EngineBundle(
            engine=peagle.start_engine(loaded, on_end=end_request),
            tokenizer=loaded.tokenizer,
            chat_template=loaded.tokenizer.chat_template,
            model_id=model_id(config.model.model),
            answers=AnswerFormat.choose(
                tool_call_parser=server.tool_call_parser,
                reasoning_parser=server.reasoning_parser,
                chat_template=loaded.tokenizer.chat_template.source,
            ),
        )

    return start


def model_id(model: str) -> str:
    """What clients call a model by default: a hub id as it is, a local checkpoint by the last part of its path."""
    path = Path(model)
    if not path.exists():
        return model
    return path.resolve().stem if path.is_file() else path.resolve().name


class DrainingServer(uvicorn.Server):
    """uvicorn, but a signal begins a drain and keeps listening, so that new work is refused with words."""

    def __init__(self, config: uvicorn.Config, *, lifecycle: Lifecycle, body_reads: BodyReads) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._body_reads = body_reads

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: finish what runs. Second: end it. Third: leave at once."""
        if self._lifecycle.is_aborting:
            self.force_exit = True
            self.should_exit = True
        logger.info("received %s", signal.Signals(sig).name)
        self._lifecycle.begin_drain()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: may the process end? A drain refuses requests whose body is still to come."""
        if self._lifecycle.is_draining:
            self._body_reads.end()
        return await super().on_tick(counter) or self._lifecycle.may_exit()


def run(settings: Settings) -> int:
    """Serve until a signal or a failure. Returns the process's exit code."""
    configure_logging(settings.server.log_level, settings.server.log_format)
    for variable, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(variable, value)
    if settings.engine.model.tensor_parallel_size > 1 and os.environ.get("RANK", "0") != "0":
        return follow(settings)
    try:
        listener = listen(settings.server.host, settings.server.port)
    except OSError as error:
        logger.error(
            "cannot listen on %s port %d: %s; choose another --host or --port",
            settings.server.host,
            settings.server.port,
            error.strerror or error,
        )
        return 1
    try:
        return serve(settings, loader_starter(settings.engine, settings.server), listener)
    except (ConfigError, OSError) as error:  # of keys and certificates, which are read at the start
        logger.error("the server cannot start: %s", error)
        return 1
    finally:
        listener.close()


def follow(settings: Settings) -> int:
    """Hold a part of the model for rank 0, which alone serves, until that one ends. Returns the exit code."""
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, signal.SIG_IGN)  # torchrun tells every rank, and rank 0 still finishes what runs
    from peagle import follow_engine

    try:
        follow_engine(settings.engine)
    except (ConfigError, ModelLoadError) as error:
        logger.error("rank %s cannot start: %s", os.environ["RANK"], error)
        return 1
    return 0


def serve(settings: Settings, start_engine: EngineStarter, listener: socket.socket) -> int:
    """Serve on an open socket, which is closed at the end. Returns the process's exit code."""
    app = create_app(settings, start_engine)
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.server.ssl_certfile is None else "https"
    logger.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
    create_server(app).run(sockets=[listener])
    if app.state.tracing is not None:
        app.state.tracing.shutdown()
    logger.info("stopped")
    lifecycle: Lifecycle = app.state.lifecycle
    return 1 if lifecycle.is_failed else 0


def create_server(app: FastAPI) -> DrainingServer:
    """The HTTP server of an app made by `create_app`."""
    settings: Settings = app.state.settings
    protocol = partial(HttpProtocol, head_timeout_s=settings.server.request_head_timeout_s)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),  # uvicorn only calls it
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_CONNECTION_S,
        timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
        ssl_certfile=settings.server.ssl_certfile,
        ssl_keyfile=settings.server.ssl_keyfile,
    )
    return DrainingServer(config, lifecycle=app.state.lifecycle, body_reads=app.state.body_reads)


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket, before anything slow.

    Raises:
        OSError: the address cannot be listened on.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)
