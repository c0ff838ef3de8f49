"""A chat server on a real socket that answers exactly what a test tells it to, well-behaved or not.

Owns just enough HTTP/1.1 (keep-alive, chunked bodies) to be measured. Every step of an answer is its own write, so
that a test decides which bytes travel together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

DONE = b"data: [DONE]\n\n"
HANG_UP = object()  # a step: close the socket in the middle of the body


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Bytes are written, floats are seconds to wait."""

    steps: Sequence[bytes | float | object]
    status: int = 200
    content_type: str = "text/event-stream; charset=utf-8"


def event(payload: object) -> bytes:
    """One server-sent event with `payload` as JSON."""
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def chunk(text: str, *, finish_reason: str | None = None, field: str = "content") -> bytes:
    """A chunk with text."""
    choice = {"index": 0, "delta": {field: text}, "finish_reason": finish_reason}
    return event({"object": "chat.completion.chunk", "choices": [choice], "usage": None})


def usage(completion_tokens: int, *, prompt_tokens: int = 7) -> bytes:
    """The closing chunk that counts the tokens."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"object": "chat.completion.chunk", "choices": [], "usage": counts})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
GOOD_STEPS = (ROLE, chunk("Hel"), chunk("lo "), chunk("wörld"), FINISH, usage(6), DONE)
GOOD_TEXT = "Hello wörld"


def good_answer(body: dict[str, Any]) -> Answer:
    """Three chunks with two tokens each, whatever was asked."""
    return Answer(steps=GOOD_STEPS)


class ChatServer:
    """Use with `async with`; `base_url` ends in /v1. `log` has the body of every chat request in order of arrival."""

    def __init__(
        self, answer: Callable[[dict[str, Any]], Answer] = good_answer, *, metrics: Callable[[], str] | None = None
    ) -> None:
        self.log: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.num_in_flight = 0
        self.max_num_in_flight = 0
        self.num_connections = 0
        self._answer = answer
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve_connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._serve_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split()[1]
        if path == "/v1/models":
            listing = json.dumps({"object": "list", "data": [{"id": "first"}, {"id": "second"}]}).encode()
            return await _write(writer, Answer(steps=[listing], content_type="application/json"))
        if path == "/metrics" and self._metrics:
            return await _write(writer, Answer(steps=[self._metrics().encode()], content_type="text/plain"))
        if path != "/v1/chat/completions":
            return await _write(writer, Answer(steps=[b"no such page"], status=404))
        self.log.append(json.loads(body))
        self.authorizations.append(headers.get("authorization"))
        self.num_in_flight += 1
        self.max_num_in_flight = max(self.max_num_in_flight, self.num_in_flight)
        try:
            return await _write(writer, self._answer(self.log[-1]))
        finally:
            self.num_in_flight -= 1


async def _write(writer: asyncio.StreamWriter, answer: Answer) -> bool:
    """Write the answer step by step; False once the connection is to be closed."""
    head = f"HTTP/1.1 {answer.status} X\r\ncontent-type: {answer.content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    for step in answer.steps:
        if step is HANG_UP:
            return False
        if isinstance(step, bytes):
            writer.write(b"%x\r\n%b\r\n" % (len(step), step))
            await writer.drain()
        else:
            assert isinstance(step, float)
            await asyncio.sleep(step)
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True
