"""The request bodies that are being read: each has a deadline between its bytes, and a drain ends them all.

Owns how long the server waits for more of a body. Refuses to know what is in it and how long it may be.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from server.errors import RequestTimeoutError, ShuttingDownError


class BodyReads:
    """All waits for more of a body, in one server. Runs on the event loop.

    Args:
        timeout_s: how long the next bytes of a body may take.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waits: set[asyncio.Timeout] = set()
        self._is_ended = False

    async def receive(self, receive: Receive) -> Message:
        """The next part of a body.

        Raises:
            RequestTimeoutError: it did not come in time.
            ShuttingDownError: it had not come when the server began to drain.
        """
        wait = asyncio.timeout(0.0 if self._is_ended else self._timeout_s)
        self._waits.add(wait)
        try:
            async with wait:
                return await receive()
        except TimeoutError:
            if self._is_ended:
                raise ShuttingDownError from None
            raise RequestTimeoutError(
                f"Nothing more of the body came for {self._timeout_s:g} s. Send the request again, without pauses."
            ) from None
        finally:
            self._waits.discard(wait)

    def end(self) -> None:
        """Wait for no body any more. To be called again as often as is convenient."""
        self._is_ended = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)
