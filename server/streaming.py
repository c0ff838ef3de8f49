"""The event stream of a chat: outputs of the engine in, server-sent events out.

Owns the wire shape of the chunks, the comments that keep an idle connection open, and the end of a stream in every
case. The path of a chunk runs for every token of every stream on a machine that also runs the model: it builds one
dictionary, encodes it and writes it, and starts no task, timer or wait of its own. Refuses to know how text comes
about.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peagle import RequestOutput
from server.errors import GenerationFailedError, describe, log_failure
from server.generation import Generation, completion_usage, until_disconnect

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second is for nginx, which buffers otherwise


def encode_event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class ChunkEncoder:
    """Writes the outputs of one request as chunks.

    The role chunk leaves together with the first text, so that the first chunk that a client sees is a real one: its
    arrival is the time to first token. The last output becomes the rest of the text, the finish chunk, the usage if it
    was asked for (with `choices` empty; `usage` is null on all other chunks then), and [DONE].
    """

    def __init__(self, *, request_id: str, created: int, model: str, include_usage: bool) -> None:
        self._head: dict[str, Any] = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        self._include_usage = include_usage
        self._is_role_sent = False

    def encode(self, output: RequestOutput) -> bytes:
        """The events of one output that did not fail; empty while its text is held back."""
        events = b""
        if not self._is_role_sent and (output.text or output.finish_reason is not None):
            self._is_role_sent = True
            events = self._chunk({"role": "assistant", "content": "", "refusal": None})
        if output.text:
            events += self._chunk({"content": output.text})
        if output.finish_reason is not None:
            events += self._chunk({}, output.finish_reason.value)
            if self._include_usage:
                usage = completion_usage(output.usage).model_dump()
                events += encode_event({**self._head, "choices": [], "usage": usage})
            events += DONE
        return events

    def _chunk(self, delta: dict[str, str | None], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return encode_event(chunk)


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


class ChatStream(Response):
    """The response of a streamed request. The status is sent at once: everything that could be refused has been."""

    def __init__(self, generation: Generation, *, include_usage: bool, keep_alive_s: float) -> None:
        super().__init__(headers=HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._generation = generation
        self._keep_alive_s = keep_alive_s
        self._encoder = ChunkEncoder(
            request_id=generation.request_id,
            created=generation.created,
            model=generation.model,
            include_usage=include_usage,
        )

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
                last_events = encode_event(describe(error).envelope()) + DONE
                log_failure(error)
            finally:
                keep_alive.stop()
            await send({"type": "http.response.body", "body": last_events, "more_body": False})

    async def _pump(self, outputs: AsyncIterator[RequestOutput], send: Send, keep_alive: KeepAlive) -> bytes:
        """Send all events but the last ones, which are returned: they close the response."""
        check, encode = self._generation.check, self._encoder.encode
        async for output in outputs:
            check(output)
            events = encode(output)
            if output.finish_reason is not None:
                return events
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                keep_alive.note_sent()
        raise GenerationFailedError("the engine's outputs ended without a finish reason")
