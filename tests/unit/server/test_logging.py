"""Lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from server.logging import JsonFormatter, RequestIdFilter, current_request_id
from tests.builders.server import chat_body, serving
from tests.fakes import ScriptedEngine


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the server's loggers write in JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(RequestIdFilter())
    logger = logging.getLogger("server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def objects(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_object_whatever_is_in_it(lines: io.StringIO) -> None:
    logger = logging.getLogger("server.test")
    token = current_request_id.set("r-1")
    logger.info('two\nlines and a "%s"', "quote", extra={"tokens": 3, "odd": object, "level": "not this"})
    current_request_id.reset(token)
    try:
        raise ValueError("x")
    except ValueError:
        logger.exception("it failed")
    first, second = objects(lines)
    assert first.pop("time").endswith("+00:00")
    assert first.pop("odd") == str(object)
    assert first == {
        "level": "info",
        "logger": "server.test",
        "request_id": "r-1",
        "message": 'two\nlines and a "quote"',
        "tokens": 3,
    }
    assert "ValueError: x" in second["traceback"]


async def test_requests_have_a_line_and_probes_none(lines: io.StringIO) -> None:
    async with serving(ScriptedEngine()) as client:
        lines.truncate(0)
        lines.seek(0)
        for path in ("/health", "/ready", "/metrics", "/ping"):
            await client.get(path)
        await client.post("/v1/chat/completions", json=chat_body(), headers={"x-request-id": "mine"})
        written = lines.getvalue()
    (line,) = [entry for entry in map(json.loads, written.splitlines()) if entry["logger"] == "server.access"]
    assert line["request_id"] == "mine"
    assert (line["event"], line["method"], line["path"], line["status"]) == (
        "http_request",
        "POST",
        "/v1/chat/completions",
        200,
    )
    assert "hello" not in written
