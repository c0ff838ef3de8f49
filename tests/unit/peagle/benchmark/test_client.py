"""One streamed answer over a real socket, from well-behaved and from broken servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from peagle.benchmark import BenchmarkError
from peagle.benchmark.client import MAX_DETAIL_CHARS, first_model, open_client, stream_chat
from peagle.benchmark.metrics import FailureKind, RequestRecord
from tests.unit.peagle.benchmark.chat_server import (
    DONE,
    FINISH,
    GOOD_STEPS,
    GOOD_TEXT,
    HANG_UP,
    ROLE,
    Answer,
    ChatServer,
    chunk,
    event,
    usage,
)

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


async def ask(answer: Answer, *, timeout_s: float = 30.0) -> RequestRecord:
    async with (
        ChatServer(lambda body: answer) as server,
        open_client(server.base_url, api_key=None, max_connections=1) as client,
    ):
        return await stream_chat(client, BODY, timeout_s=timeout_s)


async def ask_steps(steps: Sequence[bytes | float | object]) -> RequestRecord:
    return await ask(Answer(steps=steps))


async def test_a_good_answer() -> None:
    record = await ask_steps(GOOD_STEPS)
    assert record.failure is None
    assert record.text == GOOD_TEXT
    assert (record.prompt_tokens, record.completion_tokens, record.finish_reason) == (7, 6, "stop")
    assert len(record.chunk_times_s) == 3
    assert record.started_s < record.chunk_times_s[0] <= record.chunk_times_s[-1] <= record.finished_s


async def test_the_role_chunk_is_not_the_first_token() -> None:
    record = await ask_steps([ROLE, b": ping\n\n", 0.05, chunk("a"), 0.05, chunk("b"), FINISH, usage(3), DONE])
    assert record.failure is None
    assert record.ttft_s >= 0.05
    assert record.tpot_s is not None
    assert record.tpot_s == (record.chunk_times_s[1] - record.chunk_times_s[0]) / 2


async def test_bunched_chunks_arrive_together() -> None:
    record = await ask_steps([b"".join(GOOD_STEPS)])
    assert record.failure is None
    assert record.text == GOOD_TEXT
    assert len(set(record.chunk_times_s)) == 1
    assert record.tpot_s == 0.0


async def test_every_byte_alone() -> None:
    stream = b"".join(GOOD_STEPS)
    record = await ask_steps([stream[i : i + 1] for i in range(len(stream))])
    assert record.failure is None
    assert (record.text, len(record.chunk_times_s), record.completion_tokens) == (GOOD_TEXT, 3, 6)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_thinking_text_counts(field: str) -> None:
    record = await ask_steps([chunk("hm", field=field), chunk("a", finish_reason="length"), usage(2), DONE])
    assert record.failure is None
    assert (record.text, len(record.chunk_times_s), record.finish_reason) == ("hma", 2, "length")


async def test_usage_in_every_chunk_is_a_running_count() -> None:
    record = await ask_steps([chunk("a"), usage(1), chunk("b"), FINISH, usage(2), DONE])
    assert (record.failure, record.completion_tokens) == (None, 2)


@pytest.mark.parametrize(
    ("steps", "kind", "detail"),
    [
        ([ROLE, chunk("a"), event({"error": {"message": "out of blocks"}}), DONE], FailureKind.ERROR_EVENT, "blocks"),
        ([event({"error": "Unauthorized"}), DONE], FailureKind.ERROR_EVENT, "Unauthorized"),
        ([chunk("a"), FINISH, usage(1)], FailureKind.MISSING_DONE, "without"),
        ([chunk("a"), FINISH, usage(1), DONE.rstrip()], FailureKind.MISSING_DONE, "without"),
        ([], FailureKind.MISSING_DONE, "without"),
        ([chunk("a"), FINISH, DONE], FailureKind.NO_USAGE, "include_usage"),
        ([ROLE, FINISH, usage(0), DONE], FailureKind.ZERO_TOKENS, "0 tokens"),
        ([ROLE, FINISH, usage(4), DONE], FailureKind.ZERO_TOKENS, "0 chunks"),
        ([chunk("a"), usage(1), DONE], FailureKind.MISSING_FINISH_REASON, "finish_reason"),
        ([chunk("a"), b"data: {oops\n\n"], FailureKind.BAD_EVENT, "oops"),
        ([b'data: {"choices": [{"delta": "\xff"}]}\n\n'], FailureKind.BAD_EVENT, "UnicodeDecodeError"),
        ([event([1])], FailureKind.BAD_EVENT, "[1]"),
        ([event({"object": "x"})], FailureKind.BAD_EVENT, "choices"),
        ([event({"choices": [{"delta": {"content": 3}}]})], FailureKind.BAD_EVENT, "3"),
        ([chunk("a"), event({"choices": [], "usage": {"total_tokens": 3}})], FailureKind.BAD_EVENT, "prompt_tokens"),
        ([chunk("a"), HANG_UP], FailureKind.CONNECTION, "RemoteProtocolError"),
    ],
)
async def test_a_broken_stream_is_named(steps: list[bytes], kind: FailureKind, detail: str) -> None:
    record = await ask_steps(steps)
    assert record.failure is not None
    assert record.failure.kind is kind
    assert detail in record.failure.detail


async def test_a_refusal_is_told_in_one_short_line() -> None:
    record = await ask(Answer(status=503, content_type="application/json", steps=[b"over\n\nloaded " + b"x" * 1000]))
    assert record.failure is not None
    assert record.failure.kind is FailureKind.HTTP_STATUS
    assert record.failure.detail.startswith("503: over loaded xxx")
    assert len(record.failure.detail) == MAX_DETAIL_CHARS


async def test_an_answer_that_is_not_streamed() -> None:
    whole = json.dumps({"choices": [{"message": {"content": "a"}}]}).encode()
    record = await ask(Answer(content_type="application/json", steps=[whole]))
    assert record.failure is not None
    assert record.failure.kind is FailureKind.NOT_A_STREAM


async def test_comments_do_not_extend_the_time_limit() -> None:
    record = await ask(Answer(steps=[chunk("a"), *([b": ping\n\n", 0.02] * 500)]), timeout_s=0.2)
    assert record.failure is not None
    assert record.failure.kind is FailureKind.TIMEOUT
    assert record.text == "a"


async def test_nobody_listens() -> None:
    async with ChatServer() as server:
        gone = server.base_url
    async with open_client(gone, api_key=None, max_connections=1) as client:
        record = await stream_chat(client, BODY, timeout_s=5.0)
        assert record.failure is not None
        assert record.failure.kind is FailureKind.CONNECTION
        with pytest.raises(BenchmarkError, match="--model"):
            await first_model(client, timeout_s=5.0)


async def test_connections_are_reused_and_the_key_is_sent() -> None:
    async with (
        ChatServer() as server,
        open_client(server.base_url, api_key="sk-1", max_connections=1) as client,
    ):
        assert await first_model(client, timeout_s=5.0) == "first"
        for _ in range(3):
            assert (await stream_chat(client, BODY, timeout_s=5.0)).failure is None
        assert server.num_connections == 1
        assert server.authorizations == ["Bearer sk-1"] * 3


async def test_a_failed_answer_does_not_poison_the_next() -> None:
    answers = iter([Answer(steps=[event({"error": "x"}), 30.0]), Answer(steps=GOOD_STEPS)])
    async with (
        ChatServer(lambda body: next(answers)) as server,
        open_client(server.base_url, api_key=None, max_connections=1) as client,
    ):
        async with asyncio.timeout(10):
            assert (await stream_chat(client, BODY, timeout_s=5.0)).failure is not None
            assert (await stream_chat(client, BODY, timeout_s=5.0)).failure is None
