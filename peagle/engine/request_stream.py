"""The outputs of one request on their way to its consumer.

Owns the queue between steps and whoever reads them. Refuses to know threads: everything happens on the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque

from peagle.errors import PeagleError
from peagle.outputs import RequestOutput, Usage


class RequestStream:
    """A queue without a bound: a step never waits for a client.

    Args:
        num_prompt_tokens: of the request; usage starts with them.

    Attributes:
        context: that of whoever asked, for those who are told of the end.
        usage: what the latest output said, for whoever has to end the stream without the engine.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self.context = contextvars.copy_context()
        self.usage = Usage(prompt_tokens=num_prompt_tokens, completion_tokens=0)
        self._items: deque[RequestOutput | PeagleError] = deque()
        self._arrived = asyncio.Event()
        self._is_closed = False

    def put(self, item: RequestOutput | PeagleError) -> None:
        """Append an output, or the error that ends the stream."""
        if self._is_closed:
            return
        if isinstance(item, RequestOutput):
            self.usage = item.usage
        self._items.append(item)
        self._arrived.set()

    def close(self) -> None:
        """Nobody reads on: drop what is here and what is still to come."""
        self._is_closed = True
        self._items.clear()
        self._arrived.set()

    async def get(self) -> RequestOutput | None:
        """The next output; None once the stream is closed, even if that happens while this waits.

        Raises:
            PeagleError: the request was refused after all.
        """
        while not (self._items or self._is_closed):
            self._arrived.clear()
            await self._arrived.wait()
        if self._is_closed:
            return None
        item = self._items.popleft()
        if isinstance(item, PeagleError):
            raise item
        return item
