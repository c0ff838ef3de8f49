"""One streamed chat completion, timed.

Owns the HTTP exchange and the judgement whether an answer is complete. Refuses to know prompts, rounds and statistics.

An answer counts only if it is whole: status 200, `text/event-stream`, chunks without an `error`, a finish reason, a
`usage` with at least one token, and `[DONE]`. Everything else becomes a `Failure` of the record; nothing is retried.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import httpx

from peagle.benchmark import BenchmarkError
from peagle.benchmark.metrics import Failure, FailureKind, RequestRecord
from peagle.benchmark.sse import SseParser

TEXT_FIELDS = ("content", "reasoning", "reasoning_content")  # servers disagree on the name of thinking text
MAX_DETAIL_CHARS = 300
# Idle connections are dropped before common servers drop them (uvicorn: 5 s), else a reuse could meet a closed socket.
KEEPALIVE_EXPIRY_S = 2.0


class RequestFailed(Exception):
    """Raised while reading one answer; never leaves this module."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.failure = Failure(kind, " ".join(detail.split())[:MAX_DETAIL_CHARS])


class ChatTranscript:
    """What the events of one stream say, with the arrival time of every chunk that has text."""

    def __init__(self) -> None:
        self.chunk_times_s: list[float] = []
        self.prompt_tokens = 0
        self.completion_tokens: int | None = None  # None until a usage came
        self.finish_reason: str | None = None
        self.done_s: float | None = None
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    def observe(self, payload: bytes, *, now_s: float) -> None:
        """Take the payload of one event. Raises `RequestFailed` for an error event or something that is no chunk."""
        if payload.strip() == b"[DONE]":
            self.done_s = now_s
            return
        try:
            event = json.loads(payload)
            error = event.get("error")
            if error is None:
                self._observe_chunk(event, now_s=now_s)
        except (ValueError, TypeError, AttributeError, LookupError) as problem:
            detail = f"{problem!r} in {payload.decode(errors='replace')}"
            raise RequestFailed(FailureKind.BAD_EVENT, detail) from problem
        if error is not None:
            raise RequestFailed(FailureKind.ERROR_EVENT, json.dumps(error))

    def _observe_chunk(self, chunk: dict[str, Any], *, now_s: float) -> None:
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            text = "".join(delta.get(name) or "" for name in TEXT_FIELDS)
            if text:
                self.chunk_times_s.append(now_s)
                self._texts.append(text)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        usage = chunk.get("usage")
        if usage:
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.completion_tokens = int(usage["completion_tokens"])

    def check_complete(self) -> None:
        """Raise `RequestFailed` for the first thing that is missing once the stream has ended."""
        if self.done_s is None:
            raise RequestFailed(FailureKind.MISSING_DONE, "the stream ended without [DONE]")
        if self.completion_tokens is None:
            raise RequestFailed(FailureKind.NO_USAGE, "no chunk had a usage, although include_usage was asked for")
        if self.completion_tokens == 0 or not self.chunk_times_s:
            detail = f"{self.completion_tokens} tokens by usage, {len(self.chunk_times_s)} chunks with text"
            raise RequestFailed(FailureKind.ZERO_TOKENS, detail)
        if self.finish_reason is None:
            raise RequestFailed(FailureKind.MISSING_FINISH_REASON, "no chunk had a finish_reason")


def open_client(base_url: str, *, api_key: str | None, max_connections: int) -> httpx.AsyncClient:
    """A client for `base_url` (the part that ends in /v1) that keeps `max_connections` connections alive.

    Proxy settings of the environment are ignored: a proxy in between would be measured too. Compression is declined
    because compressors hold chunks back.
    """
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    limits = httpx.Limits(
        max_connections=max_connections,
        max_keepalive_connections=max_connections,
        keepalive_expiry=KEEPALIVE_EXPIRY_S,
    )
    return httpx.AsyncClient(base_url=base_url, headers=headers, limits=limits, timeout=None, trust_env=False)


async def first_model(client: httpx.AsyncClient, *, timeout_s: float) -> str:
    """The first model that the server lists. Raises `BenchmarkError` when there is none."""
    try:
        response = await client.get("models", timeout=timeout_s)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise BenchmarkError(
            f"{client.base_url}models names no model ({error!r}); is the server up? Or give --model"
        ) from error


async def stream_chat(client: httpx.AsyncClient, body: Mapping[str, Any], *, timeout_s: float) -> RequestRecord:
    """Ask once and read to the end. `timeout_s` bounds the whole exchange, so keep-alive comments do not extend it."""
    transcript = ChatTranscript()
    failure: Failure | None = None
    started_s = perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await _read_answer(client, body, transcript)
        transcript.check_complete()
    except RequestFailed as error:
        failure = error.failure
    except TimeoutError:
        failure = Failure(FailureKind.TIMEOUT, f"not finished after {timeout_s:g} s")
    except httpx.HTTPError as error:
        failure = Failure(FailureKind.CONNECTION, repr(error)[:MAX_DETAIL_CHARS])
    return RequestRecord(
        started_s=started_s,
        finished_s=perf_counter() if transcript.done_s is None else transcript.done_s,
        chunk_times_s=tuple(transcript.chunk_times_s),
        prompt_tokens=transcript.prompt_tokens,
        completion_tokens=transcript.completion_tokens or 0,
        finish_reason=transcript.finish_reason,
        text=transcript.text,
        failure=failure,
    )


async def _read_answer(client: httpx.AsyncClient, body: Mapping[str, Any], transcript: ChatTranscript) -> None:
    async with client.stream("POST", "chat/completions", json=body) as response:
        if response.status_code != 200:
            detail = f"{response.status_code}: {(await response.aread()).decode(errors='replace')}"
            raise RequestFailed(FailureKind.HTTP_STATUS, detail)
        content_type = response.headers.get("content-type", "")
        if not content_type.startswith("text/event-stream"):
            raise RequestFailed(FailureKind.NOT_A_STREAM, f"content-type is {content_type!r}")
        parser = SseParser()
        async for data in response.aiter_bytes():
            now_s = perf_counter()  # before parsing: the client's own work is no latency of the server
            for payload in parser.feed(data):
                transcript.observe(payload, now_s=now_s)
