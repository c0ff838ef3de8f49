"""A small client of the OpenAI chat API: which models there are, and an answer as pieces of text.

Owns the HTTP and the server-sent events. Refuses to know the terminal and the conversation's history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from peagle.errors import PeagleError

_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
# Between two pieces a server may be silent while it works through other prompts; ours sends a comment every 15 s.
_TIMEOUT = httpx.Timeout(connect=5.0, read=120.0, write=30.0, pool=5.0)


class ChatError(PeagleError):
    """The server cannot be reached, refuses the request, or breaks off. The message says what to do."""


class ChatClient:
    """Talks to the server at `url` (with its `/v1`). A context manager."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ChatError(f"not a server's address: {url!r}; it looks like http://127.0.0.1:8000/v1")
        self._url = url.rstrip("/")
        # A proxy from the environment is for the network, not for a server on this machine.
        is_local = urlsplit(url).hostname in _LOOPBACK
        self._http = httpx.Client(timeout=_TIMEOUT, trust_env=not is_local)

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def model_names(self) -> list[str]:
        """The served models.

        Raises:
            ChatError: no server there, or not one that speaks the OpenAI API.
        """
        try:
            response = self._http.get(f"{self._url}/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise ChatError(_refusal(response))
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ChatError(f"{self._url}/models does not answer as an OpenAI server; is the URL right?") from error

    def stream_answer(
        self, *, model: str, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]
    ) -> Iterator[str]:
        """The answer, piece by piece. Closing the iterator early closes the connection, which stops the server's work.

        Args:
            sampling: further fields of the request, such as `temperature`.

        Raises:
            ChatError: refused, unreachable, or broken off.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **sampling}
        try:
            with self._http.stream("POST", f"{self._url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_refusal(response))
                yield from _pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> ChatError:
        if isinstance(error, httpx.ConnectError):
            return ChatError(f"no server answers at {self._url}; start one with `peagle serve`, or give its --url")
        if isinstance(error, httpx.TimeoutException):
            return ChatError(f"the server at {self._url} does not answer in time; is it overloaded?")
        return ChatError(f"the connection to {self._url} broke off: {error or type(error).__name__}")


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text in a stream of server-sent events. A stream that ends without `[DONE]` was cut off."""
    for line in lines:
        if not line.startswith("data:"):  # blank lines, and the comments that keep a connection alive
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield from _text(data)
    raise ChatError("the server broke the answer off; its log says why")


def _text(data: str) -> Iterator[str]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ChatError(f"the server sent an event that is not JSON: {data[:80]!r}") from error
    if "error" in event:
        raise ChatError(f"the server reports: {event['error'].get('message', event['error'])}")
    for choice in event.get("choices", []):
        if content := choice.get("delta", {}).get("content"):
            yield content


def _refusal(response: httpx.Response) -> str:
    try:
        reason = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = response.text[:200] or response.reason_phrase
    return f"the server refuses ({response.status_code}): {reason}"
