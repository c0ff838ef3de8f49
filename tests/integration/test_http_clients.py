"""The server on a real socket, with the clients that people use: the `openai` SDK, and connections that break."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing

import httpx
import openai
import pytest

from peagle.sequence import FinishReason
from tests.builders.server import DEADLINE_S, MODEL, LiveServer, chat_body, eventually_sync, live_server
from tests.fakes import Say, ScriptedEngine

ENDLESS = [Say("x", delay_s=0.005, forever=True)]
HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def hello_server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(script=[Say("Grüße, "), Say("🙂 wor", num_tokens=3), Say("ld")])) as server:
        yield server


def sdk(server: LiveServer, *, max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=max_retries)


def test_the_sdk_whole(hello_server: LiveServer) -> None:
    with sdk(hello_server) as client:
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=5, seed=1)
        assert answer.choices[0].message.content == "Grüße, 🙂 world"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, answer.usage.prompt_tokens + 5)
        assert answer._request_id
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


def test_the_sdk_streaming(hello_server: LiveServer) -> None:
    with sdk(hello_server) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    *chunks, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Grüße, 🙂 world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 5


async def test_the_sdk_async(hello_server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{hello_server.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(number: int) -> str:
            if number % 2:
                answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
                return answer.choices[0].message.content or ""
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*[ask(number) for number in range(12)])
    assert set(answers) == {"Grüße, 🙂 world"}


def test_the_sdk_raises_the_right_errors(hello_server: LiveServer) -> None:
    with sdk(hello_server) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            client.chat.completions.create(model="gpt-9", messages=HELLO)
        assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1, stream=True)
        assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
        with pytest.raises(openai.BadRequestError) as unsupported:
            client.chat.completions.create(model=MODEL, messages=HELLO, functions=[{"name": "f"}])
        assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "functions")


def test_the_sdk_raises_on_an_error_in_mid_stream() -> None:
    with live_server(ScriptedEngine(finish_reason=FinishReason.ERROR)) as server, sdk(server) as client:
        stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        with pytest.raises(openai.APIError) as failure:
            list(stream)
        assert failure.value.code == "generation_failed"


def test_keep_alive_comments_do_not_disturb_the_sdk() -> None:
    engine = ScriptedEngine(script=[Say("a", delay_s=0.1), Say("b", delay_s=0.1)])
    with live_server(engine, keep_alive_s=0.01) as server, sdk(server) as client:
        stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ab"


def raw_request(body: bytes, *, length: int | None = None) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def connect(server: LiveServer) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=DEADLINE_S)


def is_well(server: LiveServer) -> bool:
    return httpx.get(f"{server.url}/health", timeout=DEADLINE_S).status_code == 200


@pytest.mark.parametrize("num_events", [0, 1, 20])
def test_a_client_that_leaves_a_stream(num_events: int) -> None:
    engine = ScriptedEngine(script=ENDLESS)
    with live_server(engine) as server:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=chat_body(stream=True)) as response:
            lines = response.iter_lines()
            for _ in range(num_events):
                next(lines)
        eventually_sync(lambda: len(engine.ended_early) == 1)
        assert engine.num_open == 0
        assert is_well(server)


def test_a_client_that_leaves_before_a_whole_answer() -> None:
    engine = ScriptedEngine(script=ENDLESS)
    with live_server(engine) as server:
        with closing(connect(server)) as connection:
            connection.sendall(raw_request(json.dumps(chat_body()).encode()))
            eventually_sync(lambda: engine.num_open == 1)
        eventually_sync(lambda: len(engine.ended_early) == 1)
        assert engine.num_open == 0
        assert is_well(server)


def test_a_client_that_leaves_while_nothing_is_generated() -> None:
    engine = ScriptedEngine(script=[Say("late", delay_s=3600.0)])
    with live_server(engine) as server:
        for stream in (False, True):
            with closing(connect(server)) as connection:
                connection.sendall(raw_request(json.dumps(chat_body(stream=stream)).encode()))
                eventually_sync(lambda: engine.num_open == 1)
            eventually_sync(lambda: engine.num_open == 0)
        assert len(engine.ended_early) == 2
        assert is_well(server)


@pytest.mark.parametrize("num_bytes", [0, 1, 40, 100])
def test_a_client_that_leaves_within_its_own_request(num_bytes: int) -> None:
    engine = ScriptedEngine()
    body = json.dumps(chat_body()).encode()
    with live_server(engine) as server:
        with closing(connect(server)) as connection:
            request = raw_request(body)
            connection.sendall(
                request[: len(request) - len(body) + num_bytes] if num_bytes < len(body) else request[:-1]
            )
        assert is_well(server)
        assert engine.requests == []


def test_a_connection_that_is_reset() -> None:
    engine = ScriptedEngine(script=ENDLESS)
    with live_server(engine) as server:
        connection = connect(server)
        connection.sendall(raw_request(json.dumps(chat_body(stream=True)).encode()))
        assert connection.recv(100)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
        connection.close()
        eventually_sync(lambda: len(engine.ended_early) == 1)
        assert is_well(server)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_ten_megabytes_are_refused_with_words(hello_server: LiveServer, is_chunked: bool) -> None:
    body = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 10_000_000}])).encode()
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    with httpx.Client(timeout=DEADLINE_S) as client:
        response = client.post(
            f"{hello_server.url}/v1/chat/completions",
            content=pieces if is_chunked else body,
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert client.get(f"{hello_server.url}/health").status_code == 200


def test_garbage_instead_of_http(hello_server: LiveServer) -> None:
    with closing(connect(hello_server)) as connection:
        connection.sendall(b"\x16\x03\x01\x00\xff" * 100)
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert is_well(hello_server)


def test_a_slow_reader_does_not_hold_up_others() -> None:
    engine = ScriptedEngine(script=[*[Say("y" * 10_000)] * 2_000])
    with live_server(engine) as server, closing(connect(server)) as lazy:
        lazy.sendall(raw_request(json.dumps(chat_body(stream=True)).encode()))
        eventually_sync(lambda: engine.num_open == 1)
        body = chat_body(max_tokens=1)
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE_S)
        assert answer.status_code == 200
        assert engine.num_open == 1  # the lazy one waits for its reader
    eventually_sync(lambda: engine.num_open == 0)
