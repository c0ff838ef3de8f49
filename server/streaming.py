"""The event stream of an answer: outputs of the engine in, server-sent events out.

Owns the comments that keep an idle connection open, and the end of a stream in every
case. The path of a chunk runs for every token of every stream on a machine that also runs the model: it writes it, and
starts no task, timer or wait of its own. Refuses to know what chunks look like and how text comes about.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ErrorReply, describe, log_failure
from server.fan_out import ChoiceOutput
from server.generation import Generation, until_disconnect
from server.sse import HEADERS, KEEP_ALIVE


class Chunks(Protocol):
    """Writes outputs as events: `chat_answers` and `text_answers`."""

    def encode(self, item: ChoiceOutput) -> bytes:
        """The events of one output that did not fail; may be empty."""
        ...

    def end(self) -> bytes:
        """What follows the last output."""
        ...

    def fail(self, reply: ErrorReply) -> bytes:
        """What ends the stream if the answer failed."""
        ...


class KeepAlive:
    """Writes a comment whenever nothing has been sent for `interval_s`. One timer a stream; 0 is none at all.

    A chunk only notes the time. The timer, when it fires, looks at that note, and sleeps for what is left.
    """

    def __init__(self, send: Send, *, interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(interval_s, self._look) if interval_s > 0 else None

    def note_sent(self) -> None:
        """Something was just sent."""
        self._sent_at = self._loop.time()

    def stop(self) -> None:
        """Send nothing any more, not even what was about to be."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _look(self) -> None:
        idle_s = self._loop.time() - self._sent_at
        if idle_s >= self._interval_s:
            idle_s = 0.0
            if self._comment is None or self._comment.done():  # else the client reads nothing: don't pile them up
                message = {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                self._comment = self._loop.create_task(self._write(message))
            self.note_sent()
        self._timer = self._loop.call_later(self._interval_s - idle_s, self._look)

    async def _write(self, message: dict[str, Any]) -> None:
        with suppress(ClientDisconnect):  # whoever waits for the end of the client is told as well
            await self._send(message)


class AnswerStream(Response):
    """The response of a streamed request. The status is sent at once: everything that could be refused has been.

    Args:
        generation: admitted, not yet entered.
        chunks: writes its outputs.
        keep_alive_s: seconds of silence after which a comment is sent; 0: none.
        headers: beside those of every stream.
    """

    def __init__(
        self, generation: Generation, chunks: Chunks, *, keep_alive_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(headers=HEADERS | dict(headers or {}), media_type="text/event-stream")
        del self.headers["content-length"]
        self._generation = generation
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the end, or until the client goes away (`ClientDisconnect`, after the request is aborted)."""
        await until_disconnect(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        async with self._generation as outputs:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            keep_alive = KeepAlive(send, interval_s=self._keep_alive_s)
            try:
                last_events = await self._pump(outputs, send, keep_alive)
            except ClientDisconnect:
                raise  # no failure, and nobody to tell
            except Exception as error:
                last_events = self._chunks.fail(describe(error))
                log_failure(error)
            finally:
                keep_alive.stop()
            await send({"type": "http.response.body", "body": last_events, "more_body": False})

    async def _pump(self, outputs: AsyncIterator[ChoiceOutput], send: Send, keep_alive: KeepAlive) -> bytes:
        """Send all events but those of the last output, which are returned: they close the response."""
        events = b""
        async for item in outputs:
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                keep_alive.note_sent()
            events = self._chunks.encode(item)
            if events and not item.output.is_finished:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                keep_alive.note_sent()
                events = b""
        return events + self._chunks.end()
