"""Reads one streamed chat answer and measures it. Owns the times and what makes a stream whole; knows no HTTP client.

A chunk may carry several tokens, above all with speculation. So there are two rhythms: the gaps between chunks, which a
reader sees, and the time per token, which takes the number of tokens from the server's `usage`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


class BrokenStreamError(Exception):
    """The stream is not what it should be; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMeasurement:
    """One whole answer. Times are in seconds.

    Attributes:
        first_token_s: from sending the request to the first chunk with text.
        last_token_s: from sending the request to the last one.
        gaps_s: between chunks with text; one fewer than there are chunks.
    """

    text: str
    finish_reason: str
    num_tokens: int
    first_token_s: float
    last_token_s: float
    gaps_s: tuple[float, ...]

    @property
    def time_per_token_s(self) -> float | None:
        """Of all tokens after the first; None where there is only one."""
        if self.num_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)

    @property
    def tokens_per_chunk(self) -> float:
        """An estimate of the acceptance length from outside."""
        return self.num_tokens / (len(self.gaps_s) + 1)


def measure(
    lines: Iterable[bytes],
    *,
    started_at: float,
    clock: Callable[[], float] = time.perf_counter,
    on_chunk: Callable[[], None] = lambda: None,
) -> ChatMeasurement:
    """Consume a stream that was asked for with `stream_options.include_usage`.

    Args:
        lines: of the body, as they come in.
        started_at: the clock's value when the request was sent.
        on_chunk: called behind each chunk with text; may raise, to end early.

    Raises:
        BrokenStreamError: an error event; or the end came without text, finish_reason, usage or [DONE].
    """
    times: list[float] = []
    text: list[str] = []
    finish_reason = usage = None
    for chunk in _events(lines):
        if chunk.get("error"):
            raise BrokenStreamError(f"error event: {chunk['error'].get('message', chunk['error'])}")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            finish_reason = choice.get("finish_reason") or finish_reason
            if content := choice["delta"].get("content"):
                times.append(clock() - started_at)
                text.append(content)
                on_chunk()
    num_tokens = (usage or {}).get("completion_tokens", 0)
    present = {"text": times, "finish_reason": finish_reason, "usage with completion_tokens": num_tokens}
    if missing := [name for name, value in present.items() if not value]:
        raise BrokenStreamError(f"the stream ended without {', '.join(missing)}")
    gaps = tuple(later - earlier for earlier, later in pairwise(times))
    return ChatMeasurement(
        text="".join(text),
        finish_reason=str(finish_reason),
        num_tokens=num_tokens,
        first_token_s=times[0],
        last_token_s=times[-1],
        gaps_s=gaps,
    )


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of each event up to [DONE]. Comments and blank lines are passed over."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise BrokenStreamError("the stream ended without [DONE]")
