"""Asking a server: what is tried again, what is given up, and what the reasons are called."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from peagle.errors import ConfigError
from peagle.training.chat_endpoint import (
    Answer,
    ChatEndpoint,
    EndpointError,
    Failure,
    FailureKind,
    RetryPolicy,
    open_client,
    retry_after_s,
)
from tests.unit.peagle.training.answering_server import Reply, answering_server, refuses, says

QUICK = RetryPolicy(num_tries=3, first_wait_s=0.0)
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def ask(url: str, retry: RetryPolicy = QUICK) -> Answer | Failure:
    async def run() -> Answer | Failure:
        async with open_client(url, api_key="key", concurrency=1) as client:
            return await ChatEndpoint(client, retry).answer({"messages": []})

    return asyncio.run(run())


def ask_scripted(replies: Sequence[Reply], retry: RetryPolicy = QUICK) -> tuple[Answer | Failure, int]:
    """What comes of it, and how often the server was asked."""
    waiting = list(replies)
    with answering_server(lambda body: waiting.pop(0)) as server:
        return ask(server.url, retry), len(server.bodies)


def test_an_answer() -> None:
    with answering_server(lambda body: says("Hello", finish_reason="length", num_tokens=9)) as server:
        assert ask(server.url + "/v1/") == Answer(text="Hello", finish_reason="length", num_tokens=9)
        assert server.authorizations == ["Bearer key"]


@pytest.mark.parametrize(
    "busy", [refuses(429, "slow down"), refuses(503, "starting", Retry_After="0"), Reply(status=0), refuses(502, "")]
)
def test_a_busy_server_is_asked_again(busy: Reply) -> None:
    assert ask_scripted([busy, busy, says("ok")]) == (Answer(text="ok", finish_reason="stop", num_tokens=3), 3)


def test_the_server_says_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("peagle.training.chat_endpoint.asyncio.sleep", sleep)
    retry = RetryPolicy(num_tries=5, first_wait_s=1.0)
    replies = [refuses(429, ""), refuses(503, "", Retry_After="7"), refuses(429, ""), refuses(429, "", Retry_After="?")]
    result, _ = ask_scripted([*replies, says("ok")], retry)
    assert isinstance(result, Answer)
    assert waits == [1.0, 7.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("reply", "kind", "num_asked"),
    [
        (refuses(429, "full"), FailureKind.BUSY, 3),
        (refuses(429, "come tomorrow", Retry_After="86400"), FailureKind.BUSY, 1),
        (refuses(400, "This model's maximum context length is 512 tokens."), FailureKind.TOO_LONG, 1),
        (refuses(400, "the request exceeds the available context size"), FailureKind.TOO_LONG, 1),
        (refuses(400, "temperature must be"), FailureKind.REFUSED, 1),
        (refuses(500, "the step failed"), FailureKind.REFUSED, 1),
        (Reply(status=0), FailureKind.BROKEN, 3),
        (Reply(content=["no", "completion"]), FailureKind.BROKEN, 1),
        (says("cut", finish_reason="error"), FailureKind.BROKEN, 1),
        (says(" \n"), FailureKind.EMPTY, 1),
    ],
)
def test_reasons_for_no_answer(reply: Reply, kind: FailureKind, num_asked: int) -> None:
    result, asked = ask_scripted([reply] * 3)
    assert isinstance(result, Failure)
    assert (result.kind, asked) == (kind, num_asked)
    assert result.detail


def test_a_server_that_is_gone_ends_the_run() -> None:
    with pytest.raises(EndpointError, match="goes on from there"):
        ask("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("-1", 0.0),
        ("Thu, 01 Jan 2026 12:00:30 GMT", 30.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
        ("soon", None),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, now=NOW) == seconds


def choose(models: list[str], wanted: str | None) -> str:
    async def run(url: str) -> str:
        async with open_client(url, api_key=None, concurrency=1) as client:
            return await ChatEndpoint(client).choose_model(wanted)

    with answering_server(lambda body: says(""), models=models) as server:
        return asyncio.run(run(server.url))


def test_the_first_model_is_taken_unless_one_is_named() -> None:
    assert choose(["a", "b"], None) == "a"
    assert choose(["a", "b"], "b") == "b"
    with pytest.raises(ConfigError, match="no model 'c'; it serves a, b"):
        choose(["a", "b"], "c")
    with pytest.raises(EndpointError, match="serves no model yet"):
        choose([], None)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not a server's address"):
        open_client(url, api_key=None, concurrency=1)


def test_another_kind_of_server_is_recognised() -> None:
    async def run(url: str) -> Any:
        async with open_client(url, api_key=None, concurrency=1) as client:
            return await ChatEndpoint(client).choose_model(None)

    with pytest.raises(EndpointError, match="does not list the served models"):
        asyncio.run(run("http://127.0.0.1:9"))
