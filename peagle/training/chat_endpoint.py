"""Whole answers from any server with OpenAI's chat API, asked again where waiting helps.

Owns the HTTP, and which refusals are worth another try. Refuses to know files and progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

import httpx

from peagle.errors import ConfigError, PeagleError

_BUSY = frozenset({429, 502, 503, 504})
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_TOO_LONG_SIGNS = ("context length", "context size", "context_length_exceeded")  # servers word it differently
_MAX_DETAIL_CHARS = 300


class EndpointError(PeagleError):
    """The server cannot be reached, or not used at all. The message says what to do."""


class FailureKind(Enum):
    """Why a prompt has no answer."""

    TOO_LONG = "too_long"  # prompt and answer do not fit the server's context
    REFUSED = "refused"
    BUSY = "busy"  # still refused after every try
    BROKEN = "broken"  # the exchange broke off, or what came is no answer
    EMPTY = "empty"  # an answer without text teaches nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The assistant's turn."""

    text: str
    finish_reason: str  # `stop` or `length`
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """No answer."""

    kind: FailureKind
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long to wait for a busy server. A wait that the server names itself is kept to."""

    num_tries: int = 7
    first_wait_s: float = 1.0  # doubles with each try
    longest_wait_s: float = 300.0  # a server that asks for more is not waited for

    def wait_s(self, attempt: int) -> float:
        """Seconds before the try after `attempt` (from 0), if the server does not say."""
        return min(self.first_wait_s * 2.0**attempt, self.longest_wait_s)


class ChatEndpoint:
    """The chat API below `base_url`.

    Args:
        client: with the base URL and the key; see `open_client`.
        retry: what to do about a busy server.
    """

    def __init__(self, client: httpx.AsyncClient, retry: RetryPolicy | None = None) -> None:
        self._client = client
        self._retry = retry or RetryPolicy()

    async def choose_model(self, wanted: str | None) -> str:
        """`wanted`, or the first served model.

        Raises:
            EndpointError: no server with OpenAI's API is there.
            ConfigError: it serves no such model.
        """
        try:
            response = await self._client.get("models")
            response.raise_for_status()
            names = [str(model["id"]) for model in response.json()["data"]]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise EndpointError(
                f"{self._client.base_url}models does not list the served models ({error!r}); is the server up, and is "
                "--base-url right?"
            ) from None
        if wanted is not None and wanted not in names:
            raise ConfigError(f"the server has no model {wanted!r}; it serves {', '.join(names) or 'none'}")
        if not names:
            raise EndpointError("the server serves no model yet; wait until its /ready says so")
        return wanted or names[0]

    async def answer(self, body: Mapping[str, Any]) -> Answer | Failure:
        """Ask, and wait for the whole answer.

        Raises:
            EndpointError: nothing listens there any more, after every try.
        """
        failure = Failure(kind=FailureKind.BUSY, detail="")
        for attempt in range(self._retry.num_tries):
            wait_s = self._retry.wait_s(attempt)
            try:
                response = await self._client.post("chat/completions", json=dict(body))
            except httpx.ConnectError as error:
                if attempt + 1 == self._retry.num_tries:
                    raise EndpointError(
                        f"no server answers at {self._client.base_url} any more ({error}); what was answered is kept, "
                        "and the same command goes on from there"
                    ) from None
            except httpx.HTTPError as error:
                failure = Failure(kind=FailureKind.BROKEN, detail=repr(error)[:_MAX_DETAIL_CHARS])
            else:
                if response.status_code not in _BUSY:
                    return _read(response)
                failure = Failure(kind=FailureKind.BUSY, detail=_detail(response))
                asked_s = retry_after_s(response.headers.get("retry-after"), now=datetime.now(UTC))
                wait_s = wait_s if asked_s is None else asked_s
                if wait_s > self._retry.longest_wait_s:
                    return failure
            if attempt + 1 < self._retry.num_tries:
                await asyncio.sleep(wait_s)
        return failure


def open_client(base_url: str, *, api_key: str | None, concurrency: int, timeout_s: float = 600.0) -> httpx.AsyncClient:
    """A client for `base_url`, with or without its `/v1`. A proxy of the environment is not used for this machine.

    Raises:
        ConfigError: this is no address.
    """
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"not a server's address: {base_url!r}; it looks like http://127.0.0.1:8000/v1")
    path = url.path.rstrip("/")
    return httpx.AsyncClient(
        base_url=url.copy_with(path=path if path.endswith("/v1") else f"{path}/v1"),
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=2.0),
        timeout=httpx.Timeout(timeout_s, connect=10.0),
        trust_env=url.host not in _LOOPBACK,
    )


def retry_after_s(header: str | None, *, now: datetime) -> float | None:
    """Seconds that a `Retry-After` asks for, a number or a date; None without one that can be read."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - now).total_seconds())
    except (ValueError, TypeError):
        return None


def _read(response: httpx.Response) -> Answer | Failure:
    if response.status_code != 200:
        detail = _detail(response)
        is_too_long = any(sign in response.text.lower() for sign in _TOO_LONG_SIGNS)
        return Failure(kind=FailureKind.TOO_LONG if is_too_long else FailureKind.REFUSED, detail=detail)
    try:
        content = response.json()
        choice = content["choices"][0]
        text, finish_reason = choice["message"]["content"] or "", str(choice["finish_reason"])
        num_tokens = int((content.get("usage") or {}).get("completion_tokens", 0))
    except (ValueError, LookupError, TypeError, AttributeError):
        return Failure(kind=FailureKind.BROKEN, detail=f"not a chat completion: {response.text[:_MAX_DETAIL_CHARS]}")
    if not text.strip():
        return Failure(kind=FailureKind.EMPTY, detail=f"finish_reason {finish_reason}")
    if finish_reason not in ("stop", "length"):
        return Failure(kind=FailureKind.BROKEN, detail=f"finish_reason {finish_reason}")
    return Answer(text=text, finish_reason=finish_reason, num_tokens=num_tokens)


def _detail(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.text
    return f"{response.status_code}: {' '.join(message.split())}"[:_MAX_DETAIL_CHARS]
