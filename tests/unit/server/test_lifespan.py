"""The life of a process: drains, second signals, stops while loading."""

from __future__ import annotations

import asyncio
import threading

import pytest

from peagle.engine.interface import PhaseListener
from server.engine_bundle import EngineBundle
from server.lifespan import _without_directories
from tests.builders.server import build_app, chat_body, eventually, is_loaded, started, starter
from tests.fakes import Say, ScriptedEngine
from tests.unit.server.test_bad_input import assert_envelope
from tests.unit.server.test_streaming import events_of

PATH = "/v1/chat/completions"


async def test_a_drain_lets_requests_finish_and_takes_no_more() -> None:
    engine = ScriptedEngine(script=[Say("slow", delay_s=0.2)])
    app = build_app(starter(engine))
    async with started(app) as client:
        await eventually(lambda: is_loaded(app))
        lifecycle = app.state.lifecycle
        assert not lifecycle.may_exit()
        running = asyncio.create_task(client.post(PATH, json=chat_body()))
        await eventually(lambda: engine.num_open == 1)
        lifecycle.begin_drain()
        assert not lifecycle.may_exit()
        response = await client.post(PATH, json=chat_body())
        assert_envelope(response, status=503, code="server_shutting_down", param=None)
        assert response.headers["x-should-retry"] == "true"
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert (await client.get("/health")).status_code == 200
        assert (await running).json()["choices"][0]["message"]["content"] == "slow"
        assert lifecycle.may_exit()
    assert engine.was_shut_down


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_finish_in_time_is_ended_with_an_error(stream: bool) -> None:
    engine = ScriptedEngine(script=[Say("x", delay_s=0.005, forever=True)])
    app = build_app(starter(engine), shutdown_timeout_s=0.0)
    async with started(app) as client:
        await eventually(lambda: is_loaded(app))
        running = asyncio.create_task(client.post(PATH, json=chat_body(stream=stream)))
        await eventually(lambda: engine.num_open == 1)
        app.state.lifecycle.begin_drain()
        await eventually(app.state.lifecycle.may_exit)
        response = await running
    if stream:
        assert response.status_code == 200
        assert events_of(response.text)[-1]["error"]["code"] == "server_shutting_down"
    else:
        assert_envelope(response, status=503, code="server_shutting_down", param=None)


async def test_a_second_signal_ends_what_runs() -> None:
    engine = ScriptedEngine(script=[Say("x", delay_s=0.005, forever=True)])
    app = build_app(starter(engine), shutdown_timeout_s=3600.0)
    async with started(app) as client:
        await eventually(lambda: is_loaded(app))
        running = asyncio.create_task(client.post(PATH, json=chat_body()))
        await eventually(lambda: engine.num_open == 1)
        app.state.lifecycle.begin_drain()
        assert not app.state.lifecycle.may_exit()
        app.state.lifecycle.begin_drain()
        await eventually(app.state.lifecycle.may_exit)
        assert (await running).status_code == 503


async def test_stopping_while_loading_does_not_wait_and_leaves_no_engine() -> None:
    engine = ScriptedEngine()
    may_load = threading.Event()

    def start(on_phase: PhaseListener) -> EngineBundle:
        may_load.wait()
        return starter(engine)(on_phase)

    app = build_app(start)
    async with started(app):
        app.state.lifecycle.begin_drain()
        assert app.state.lifecycle.may_exit()
    may_load.set()
    await eventually(lambda: engine.was_shut_down)


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("cannot read /models/secret/config.json: no such file", "cannot read config.json: no such file"),
        ("'/root/a/b.safetensors' is cut short", "'b.safetensors' is cut short"),
        ("serving acme/tiny at 12 tokens/s", "serving acme/tiny at 12 tokens/s"),
        ("see https://example.org/docs/x", "see https://example.org/docs/x"),
    ],
)
def test_directories_are_left_out(text: str, public: str) -> None:
    assert _without_directories(text) == public
