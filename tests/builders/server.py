"""The HTTP side around an engine of the test's choice: in process, or on a real socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from fastapi import FastAPI

import peagle
from peagle import Engine, EngineConfig, EnginePhase, PhaseListener
from peagle.text import AnswerFormat, Tokenizer
from server.access import end_request
from server.engine_bundle import EngineBundle, EngineStarter
from server.lifespan import Lifecycle
from server.main import create_app, create_server, listen
from server.settings import ServerConfig, Settings
from tests.builders.tokenizer import build_tokenizer_directory

MODEL = "acme/tiny"
DEADLINE_S = 20.0  # for things that take milliseconds; generous, so that a busy machine fails no test


@cache
def tiny_tokenizer() -> Tokenizer:
    """A real tokenizer of 272 tokens with a chat template."""
    with TemporaryDirectory() as directory:
        return Tokenizer.from_directory(build_tokenizer_directory(Path(directory)))


def starter(engine: Engine, answers: AnswerFormat | None = None) -> EngineStarter:
    """Loads nothing: hands over `engine`."""

    def start(on_phase: PhaseListener) -> EngineBundle:
        on_phase(EnginePhase.LOADING_TARGET, "from /models/secret/tiny.safetensors")
        tokenizer = tiny_tokenizer()
        bundle = EngineBundle(engine=engine, tokenizer=tokenizer, chat_template=tokenizer.chat_template, model_id=MODEL)
        return bundle if answers is None else replace(bundle, answers=answers)

    return start


def engine_starter(config: EngineConfig, answers: AnswerFormat | None = None) -> EngineStarter:
    """Loads a real engine, as `peagle serve` does."""

    def start(on_phase: PhaseListener) -> EngineBundle:
        loaded = peagle.load_engine(config, on_phase)
        bundle = EngineBundle(
            engine=peagle.start_engine(loaded, on_end=end_request),
            tokenizer=loaded.tokenizer,
            chat_template=loaded.tokenizer.chat_template,
            model_id=MODEL,
        )
        return bundle if answers is None else replace(bundle, answers=answers)

    return start


def build_app(start_engine: EngineStarter, **server_options: Any) -> FastAPI:
    """An app whose server settings differ from the defaults by `server_options`."""
    return create_app(Settings(server=ServerConfig(**server_options)), start_engine)


def chat_body(**fields: Any) -> dict[str, Any]:
    """A small valid request, with `fields` on top."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it did not come true"
        await asyncio.sleep(0.005)


def eventually_sync(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it did not come true"
        time.sleep(0.005)


def is_loaded(app: FastAPI) -> bool:
    """True once the engine is there."""
    lifecycle: Lifecycle = app.state.lifecycle
    return lifecycle.bundle is not None


@asynccontextmanager
async def started(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Run the app's lifespan, and talk to it in process. Does not wait for the engine."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


@asynccontextmanager
async def serving(
    engine: Engine, *, answers: AnswerFormat | None = None, **server_options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a ready server, in process."""
    app = build_app(starter(engine, answers), **server_options)
    async with started(app) as client:
        await eventually(lambda: is_loaded(app))
        yield client


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A server on a real socket of this machine."""

    app: FastAPI
    url: str
    thread: threading.Thread

    @property
    def lifecycle(self) -> Lifecycle:
        lifecycle: Lifecycle = self.app.state.lifecycle
        return lifecycle


def live_server(engine: Engine, **server_options: Any) -> AbstractContextManager[LiveServer]:
    """A ready server around an engine."""
    return live_server_of(starter(engine), **server_options)


@contextmanager
def live_server_of(start_engine: EngineStarter, **server_options: Any) -> Iterator[LiveServer]:
    """A ready server: uvicorn in a thread of its own, as `peagle serve` runs it."""
    app = build_app(start_engine, **server_options)
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=create_server(app).run, kwargs={"sockets": [listener]}, name="live-server")
    thread.start()
    server = LiveServer(app, url, thread)
    try:
        eventually_sync(lambda: is_loaded(app))
        yield server
    finally:
        server.lifecycle.begin_drain()
        server.lifecycle.begin_drain()  # the second asks to end what still runs
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
