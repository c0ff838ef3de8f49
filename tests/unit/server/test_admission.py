"""The door: who waits, who is refused, and who goes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from peagle import EngineConfig, SchedulerConfig
from server.main import create_app
from server.settings import ServerConfig, Settings
from tests.builders.server import chat_body, eventually, is_loaded, started, starter
from tests.fakes import Say, ScriptedEngine
from tests.unit.server.test_bad_input import assert_envelope

PATH = "/v1/chat/completions"
NUM_PLACES = 2  # one that runs, and one to spare


@asynccontextmanager
async def small_server(engine: ScriptedEngine, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI]]:
    """A ready server that runs one request at a time, with two keys."""
    settings = Settings(
        server=ServerConfig(api_key=("alice a", "bob b"), **options),
        engine=EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)),
    )
    app = create_app(settings, starter(engine))
    async with started(app) as client:
        await eventually(lambda: is_loaded(app))
        yield client, app


def ask(client: httpx.AsyncClient, key: str = "a", **fields: Any) -> asyncio.Task[httpx.Response]:
    headers = {"authorization": f"Bearer {key}"}
    return asyncio.create_task(client.post(PATH, json=chat_body(**fields), headers=headers))


async def fill(client: httpx.AsyncClient, engine: ScriptedEngine, app: FastAPI, *, num_waiting: int) -> list[Any]:
    """Take every place, and let more wait."""
    tasks = [ask(client) for _ in range(NUM_PLACES)]
    await eventually(lambda: engine.num_open == NUM_PLACES)
    tasks += [ask(client) for _ in range(num_waiting)]
    await eventually(lambda: app.state.admission.num_waiting == num_waiting)
    return tasks


def end_all(engine: ScriptedEngine) -> None:
    for request_id in list(engine.streams):
        engine.abort(request_id)


def endless() -> ScriptedEngine:
    return ScriptedEngine(script=[Say("x", delay_s=0.005, forever=True)])


async def test_beyond_the_queue_requests_are_refused_before_their_stream_begins() -> None:
    engine = endless()
    async with small_server(engine, max_queued_requests=1) as (client, app):
        tasks = await fill(client, engine, app, num_waiting=1)
        refused = await ask(client, stream=True)
        assert_envelope(refused, status=503, code="server_overloaded", param=None)
        assert float(refused.headers["retry-after"]) >= 1
        assert float(refused.headers["retry-after-ms"]) >= 1000
        page = (await client.get("/metrics")).text
        assert 'vllm:num_requests_waiting{engine="0",model_name="acme/tiny"} 1\n' in page
        assert 'vllm:admission_rejections_total{reason="server_overloaded"} 1.0' in page
        while not all(task.done() for task in tasks):  # a place that is given back goes to the one that waits
            end_all(engine)
            await asyncio.sleep(0.005)
        assert len(engine.requests) == 3
        assert app.state.admission.num_waiting == 0


async def test_a_client_with_one_request_passes_one_with_many() -> None:
    engine = endless()
    async with small_server(engine, max_queued_requests=8) as (client, app):
        tasks = await fill(client, engine, app, num_waiting=5)
        tasks.append(ask(client, "b", max_tokens=7))
        await eventually(lambda: app.state.admission.num_waiting == 6)
        engine.abort(next(iter(engine.streams)))
        await eventually(lambda: len(engine.requests) == 3)
        assert engine.requests[-1].params.max_tokens == 7
        while not all(task.done() for task in tasks):
            end_all(engine)
            await asyncio.sleep(0.005)


async def test_in_a_full_queue_the_newest_of_the_largest_client_makes_room() -> None:
    engine = endless()
    async with small_server(engine, max_queued_requests=3) as (client, app):
        tasks = await fill(client, engine, app, num_waiting=3)
        other = ask(client, "b")
        await eventually(lambda: tasks[-1].done())
        assert_envelope(await tasks[-1], status=503, code="server_overloaded", param=None)
        assert not other.done()
        while not all(task.done() for task in (*tasks, other)):
            end_all(engine)
            await asyncio.sleep(0.005)


async def test_waiting_has_an_end() -> None:
    engine = endless()
    async with small_server(engine, queue_timeout_s=0.05) as (client, app):
        tasks = [ask(client) for _ in range(NUM_PLACES)]
        await eventually(lambda: engine.num_open == NUM_PLACES)
        refused = await ask(client)
        assert_envelope(refused, status=503, code="queue_timeout", param=None)
        assert float(refused.headers["retry-after"]) >= 1
        assert app.state.admission.num_waiting == 0
        end_all(engine)
        await asyncio.gather(*tasks)


async def test_a_client_that_leaves_the_queue_takes_no_place() -> None:
    engine = endless()
    async with small_server(engine) as (client, app):
        tasks = await fill(client, engine, app, num_waiting=2)
        tasks[2].cancel()
        await eventually(lambda: app.state.admission.num_waiting == 1)
        for _ in range(3):
            end_all(engine)
            await asyncio.sleep(0.02)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(engine.requests) == 3


async def test_the_queue_holds_so_many_tokens() -> None:
    engine = endless()
    long = [{"role": "user", "content": "hello " * 40}]
    async with small_server(engine, max_queued_tokens=60) as (client, app):
        tasks = [ask(client) for _ in range(NUM_PLACES)]
        await eventually(lambda: engine.num_open == NUM_PLACES)
        tasks.append(ask(client, messages=long))  # alone it may wait, however long it is
        await eventually(lambda: app.state.admission.num_waiting == 1)
        assert_envelope(await ask(client), status=503, code="server_overloaded", param=None)
        while not all(task.done() for task in tasks):
            end_all(engine)
            await asyncio.sleep(0.005)


async def test_one_client_has_so_many_requests() -> None:
    engine = endless()
    async with small_server(engine, max_requests_per_client=1) as (client, _):
        tasks = [ask(client)]
        await eventually(lambda: engine.num_open == 1)
        refused = await ask(client)
        assert_envelope(refused, status=429, code="rate_limit_exceeded", param=None)
        assert "retry-after" in refused.headers
        tasks.append(ask(client, "b"))
        await eventually(lambda: engine.num_open == 2)
        end_all(engine)
        await asyncio.gather(*tasks)
        engine.script = [Say("done")]
        assert (await ask(client)).status_code == 200


async def test_one_client_has_so_many_tokens_a_minute() -> None:
    engine = ScriptedEngine()
    async with small_server(engine, max_tokens_per_minute=2) as (client, _):
        assert (await ask(client)).status_code == 200
        refused = await ask(client)
        assert_envelope(refused, status=429, code="rate_limit_exceeded", param=None)
        assert float(refused.headers["retry-after"]) > 1
        assert (await ask(client, "b")).status_code == 200


async def test_a_drain_lets_those_in_who_wait_and_an_abort_tells_them() -> None:
    engine = endless()
    async with small_server(engine, shutdown_timeout_s=100.0) as (client, app):
        tasks = await fill(client, engine, app, num_waiting=2)
        app.state.lifecycle.begin_drain()
        assert app.state.lifecycle.num_active == NUM_PLACES + 2
        engine.abort(next(iter(engine.streams)))
        await eventually(lambda: len(engine.requests) == 3)
        app.state.lifecycle.begin_drain()
        await eventually(app.state.lifecycle.may_exit)
        for response in await asyncio.gather(*tasks):
            assert_envelope(response, status=503, code="server_shutting_down", param=None)


@pytest.mark.parametrize("stream", [False, True])
async def test_places_come_back_whatever_happens(stream: bool) -> None:
    engine = ScriptedEngine(failure=RuntimeError("boom"))
    async with small_server(engine) as (client, _):
        for _ in range(3 * NUM_PLACES):
            await ask(client, stream=stream)
        engine.failure = None
        assert (await ask(client)).status_code == 200
