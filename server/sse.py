"""Server-sent events on the wire."""

from __future__ import annotations

from typing import Any

import orjson

from server.errors import ErrorReply

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second is for nginx, which buffers otherwise


def failure_events(reply: ErrorReply) -> bytes:
    """The end of a stream of completions whose answer failed."""
    return encode_event(reply.envelope()) + DONE


def encode_event(data: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"
