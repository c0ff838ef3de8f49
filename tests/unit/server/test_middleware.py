"""Request ids, the access log, the limit of a body, and the last catch."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.middleware import RequestMiddleware
from tests.builders.server import chat_body, serving
from tests.fakes import ScriptedEngine
from tests.unit.server.test_bad_input import JSON, assert_envelope

PATH = "/v1/chat/completions"


async def test_a_request_id_is_echoed() -> None:
    async with serving(ScriptedEngine()) as client:
        for path in ("/health", "/nothing", "/v1/models"):
            response = await client.get(path, headers={"x-request-id": "abc-123"})
            assert response.headers.get_list("x-request-id") == ["abc-123"]


@pytest.mark.parametrize("bad_id", ["", "has space", "x" * 129, "umläut"])
async def test_an_unfit_request_id_is_replaced(bad_id: str) -> None:
    async with serving(ScriptedEngine()) as client:
        response = await client.get("/health", headers=[(b"x-request-id", bad_id.encode("latin-1"))])
    assert len(response.headers["x-request-id"]) == 32
    assert response.headers["x-request-id"] != bad_id


async def test_minted_ids_differ() -> None:
    async with serving(ScriptedEngine()) as client:
        ids = {(await client.get("/health")).headers["x-request-id"] for _ in range(10)}
    assert len(ids) == 10


async def test_requests_are_logged_and_probes_are_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="server.access"):
        async with serving(ScriptedEngine()) as client:
            await client.post(PATH, json=chat_body())
            await client.get("/line%0Abreak")
            for path in ("/health", "/ready", "/metrics"):
                await client.get(path)
    lines = [record.getMessage() for record in caplog.records if record.name == "server.access"]
    assert [line.split()[1:4] for line in lines] == [
        ["POST", PATH, "200"],
        ["GET", "/line%0Abreak", "404"],
    ]
    assert "hello" not in caplog.text  # prompts are never logged


def body_of(num_bytes: int) -> bytes:
    """A valid request of exactly this size."""
    frame = json.dumps(chat_body(messages=[{"role": "user", "content": ""}]))
    return frame.replace('"content": ""', '"content": "' + "x" * (num_bytes - len(frame)) + '"').encode()


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_the_body_limit(is_chunked: bool) -> None:
    async def pieces(content: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(content), 100):
            yield content[start : start + 100]

    engine = ScriptedEngine(max_model_len=10_000)
    async with serving(engine, max_body_bytes=2048) as client:
        for num_bytes in (2048, 2049):
            content = body_of(num_bytes)
            response = await client.post(PATH, content=pieces(content) if is_chunked else content, headers=JSON)
            if num_bytes == 2048:
                assert response.status_code == 200, response.text
            else:
                message = assert_envelope(response, status=413, code="request_too_large", param=None)
                assert "2048" in message
                assert "x-request-id" in response.headers
    assert len(engine.requests) == 1


async def test_the_unexpected_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(refusal=KeyError("secret"))
    async with serving(engine) as client:
        response = await client.post(PATH, json=chat_body(), headers={"x-request-id": "abc"})
        assert_envelope(response, status=500, code="internal_error", param=None)
        assert response.headers["x-request-id"] == "abc"
        assert "secret" not in response.text
        assert "KeyError: 'secret'" in caplog.text
        engine.refusal = None
        assert (await client.post(PATH, json=chat_body())).status_code == 200


async def test_a_connection_reset_before_a_write_is_a_client_that_has_gone(caplog: pytest.LogCaptureFixture) -> None:
    """uvloop raises a plain RuntimeError then; it must neither be logged as our failure nor stop the server."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_message: Message) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    scope: Scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "client": None, "query_string": b""}
    with caplog.at_level(logging.INFO):
        await RequestMiddleware(app)(scope, receive, send)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert " 499 " in caplog.text
