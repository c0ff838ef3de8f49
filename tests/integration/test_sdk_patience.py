"""The `openai` SDK when things take time: retries that wait as they are told, deadlines, cancellation, raw headers."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import openai
import pytest

from peagle.errors import EngineOverloadedError
from tests.builders.server import MODEL, LiveServer, eventually_sync, live_server
from tests.fakes import Say, ScriptedEngine

HELLO: Any = [{"role": "user", "content": "hello"}]


def sdk(server: LiveServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", **({"max_retries": 0} | options))


def test_an_overloaded_server_is_asked_again_when_it_says_so() -> None:
    engine = ScriptedEngine(refusal=EngineOverloadedError("the queue is full"))
    with live_server(engine) as server:
        with sdk(server) as impatient, pytest.raises(openai.InternalServerError) as refused:
            impatient.chat.completions.create(model=MODEL, messages=HELLO)
        assert refused.value.status_code == 503
        wait_s = float(refused.value.response.headers["retry-after"])

        def free() -> None:
            engine.refusal = None

        timer = threading.Timer(0.3, free)
        timer.start()
        started = time.monotonic()
        with sdk(server, max_retries=2) as patient:
            answer = patient.chat.completions.create(model=MODEL, messages=HELLO)
        timer.join()
        assert answer.choices[0].message.content == "Hello world"
        assert time.monotonic() - started >= min(wait_s, 1.0) * 0.9


def test_a_client_over_its_limit_gets_in_when_its_other_request_has_ended() -> None:
    engine = ScriptedEngine(script=[Say("x", delay_s=0.2), Say("y", delay_s=0.6)])
    with live_server(engine, max_requests_per_client=1) as server, sdk(server, max_retries=4) as client:
        stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        next(iter(stream))
        with sdk(server) as impatient, pytest.raises(openai.RateLimitError) as refused:
            impatient.chat.completions.create(model=MODEL, messages=HELLO)
        assert int(refused.value.response.headers["retry-after-ms"]) > 0
        assert client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message.content == "xy"
        stream.close()


def test_a_deadline_ends_the_request_in_the_engine() -> None:
    engine = ScriptedEngine(script=[Say("x", delay_s=30.0)])
    with live_server(engine) as server, sdk(server, timeout=0.4) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model=MODEL, messages=HELLO)
        eventually_sync(lambda: engine.num_open == 0)
        assert len(engine.ended_early) == 1


def test_leaving_a_stream_ends_the_request_in_the_engine() -> None:
    engine = ScriptedEngine(script=[Say("x", delay_s=0.02, forever=True)])
    with live_server(engine) as server, sdk(server) as client:
        with client.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as stream:
            next(iter(stream))
        eventually_sync(lambda: engine.num_open == 0)
        assert len(engine.ended_early) == 1


async def test_cancelling_a_task_ends_the_request_in_the_engine() -> None:
    engine = ScriptedEngine(script=[Say("x", delay_s=30.0)])
    with live_server(engine) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            task = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
            while not engine.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.to_thread(eventually_sync, lambda: engine.num_open == 0)


def test_headers_can_be_read_beside_the_answer() -> None:
    with live_server(ScriptedEngine()) as server, sdk(server) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, extra_headers={"x-request-id": "mine-1"}, extra_body={"mood": "good"}
        )
        assert raw.headers["x-request-id"] == "mine-1"
        assert raw.headers["x-ignored-fields"] == "mood"
        answer = raw.parse()
        assert answer.choices[0].message.content == "Hello world"
        assert answer._request_id == "mine-1"
        with client.chat.completions.with_streaming_response.create(model=MODEL, messages=HELLO) as response:
            assert b"Hello world" in response.read()
