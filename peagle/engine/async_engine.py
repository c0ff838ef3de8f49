"""The bridge between the engine's thread and the event loop, in one class.

Owns the thread, the inbox into it and the streams out of it: requests cross by a locked list, outputs by one
`call_soon_threadsafe` per step. Methods under "event loop only" and "engine thread only" are called on that side only.
Refuses to know HTTP and how a step works.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from peagle.engine.engine import LLMEngine
from peagle.engine.interface import EngineHealth
from peagle.errors import EngineDeadError, EngineOverloadedError, PeagleError, RequestError
from peagle.outputs import RequestInput, RequestOutput, Usage
from peagle.sequence import FinishReason
from peagle.stats import EngineStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Delivery:
    """What one step has for one request: an output, or the error that refused it."""

    request_id: str
    item: RequestOutput | PeagleError


class _Stream:
    """Outputs of one request, waiting for its consumer. Event loop only."""

    def __init__(self) -> None:
        self._items: deque[RequestOutput | PeagleError] = deque()
        self._arrived = asyncio.Event()

    def put(self, item: RequestOutput | PeagleError) -> None:
        self._items.append(item)
        self._arrived.set()

    async def get(self) -> RequestOutput:
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        if isinstance(item, PeagleError):
            raise item
        return item


class AsyncLLMEngine:
    """See `interface.Engine`.

    Args:
        engine: driven by this object's thread from now on; nobody else may call it.
        max_num_requests: most requests under way, running and waiting; more are refused at the door.
    """

    def __init__(self, engine: LLMEngine, *, max_num_requests: int) -> None:
        self._engine = engine
        self._max_num_requests = max_num_requests
        self._inbox: deque[RequestInput | _Abort] = deque()
        self._wake = threading.Condition()
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        self._error: str | None = None
        self._busy_since: float | None = None
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
        self._thread.start()

    # -- event loop only ---------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        return self._engine.max_model_len

    def generate(self, request: RequestInput) -> AsyncIterator[RequestOutput]:
        """Admit a request and stream its outputs. See `interface.Engine.generate`."""
        self._require_alive()
        self._engine.check_request(request)
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is already under way", param="request_id")
        if len(self._streams) >= self._max_num_requests:
            raise EngineOverloadedError(f"{len(self._streams)} requests are under way already; try again later")
        self._loop = asyncio.get_running_loop()
        stream = self._streams[request.request_id] = _Stream()
        self._post(request)
        return _Consumer(self, request.request_id, stream)

    def abort(self, request_id: str) -> None:
        """End a request within one step."""
        if request_id in self._streams:
            self._post(_Abort(request_id))

    def health(self) -> EngineHealth:
        """State of the engine thread."""
        busy_since = self._busy_since
        age = 0.0 if busy_since is None else time.monotonic() - busy_since
        return EngineHealth(is_alive=self._thread.is_alive(), step_age_s=age, error=self._error)

    def stats(self) -> EngineStats:
        """The snapshot that the last step left."""
        return self._stats

    def shutdown(self) -> None:
        """Stop the thread; requests under way end with ABORT."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    def release(self, request_id: str) -> None:
        """The consumer has gone: forget its stream, and abort the request if it has not ended."""
        if self._streams.pop(request_id, None) is not None and self._thread.is_alive():
            self._post(_Abort(request_id))

    def _post(self, message: RequestInput | _Abort) -> None:
        with self._wake:
            self._inbox.append(message)
            if self._busy_since is None:
                self._busy_since = time.monotonic()
            self._wake.notify()

    def _require_alive(self) -> None:
        if not self._thread.is_alive() or self._is_stopping:
            raise EngineDeadError(f"the engine has ended: {self._error or 'it was shut down'}")

    def _deliver(self, deliveries: list[_Delivery]) -> None:
        for delivery in deliveries:
            stream = self._streams.get(delivery.request_id)
            if stream is None:
                continue  # its consumer has gone
            if isinstance(delivery.item, PeagleError) or delivery.item.is_finished:
                del self._streams[delivery.request_id]
            stream.put(delivery.item)

    # -- engine thread only ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._send(self._take_inbox() + [_delivery(output) for output in self._engine.step()])
                self._stats = self._engine.stats()
                # The heartbeat: reset by every finished step, so that its age is the age of the one that runs.
                self._busy_since = time.monotonic() if self._engine.has_work else None
            self._send([_delivery(output) for output in self._engine.abort_all()])
        except BaseException as error:
            self._die(error)
        self._stats = self._engine.stats()

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._inbox or self._engine.has_work or self._is_stopping):
                self._busy_since = None
                self._wake.wait()
            return not self._is_stopping

    def _take_inbox(self) -> list[_Delivery]:
        """Act on every message; deliveries for requests that were refused or aborted."""
        with self._wake:
            messages, self._inbox = self._inbox, deque()
        deliveries = []
        for message in messages:
            if isinstance(message, _Abort):
                aborted = self._engine.abort(message.request_id)
                if aborted is not None:
                    deliveries.append(_delivery(aborted))
                continue
            try:
                self._engine.add_request(message)
            except PeagleError as error:
                deliveries.append(_Delivery(message.request_id, error))
        return deliveries

    def _send(self, deliveries: list[_Delivery]) -> None:
        if not deliveries or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, deliveries)
        except RuntimeError:
            logger.warning("the event loop is closed; %d outputs have no reader", len(deliveries))

    def _die(self, error: BaseException) -> None:
        """The loop itself raised, which isolation of steps should have prevented: fail what is left and end."""
        self._error = f"{type(error).__name__}: {error}"
        logger.critical("the engine has ended", exc_info=error)
        message = "the engine has ended"
        request_ids = list(self._streams)
        failed = [
            RequestOutput(
                request_id=request_id,
                text="",
                token_ids=[],
                finish_reason=FinishReason.ERROR,
                usage=Usage(prompt_tokens=0, completion_tokens=0),
                error=message,
            )
            for request_id in request_ids
        ]
        self._send([_delivery(output) for output in failed])


def _delivery(output: RequestOutput) -> _Delivery:
    return _Delivery(output.request_id, output)


class _Consumer(AsyncIterator[RequestOutput]):
    """The outputs of one request; leaving it early aborts the request."""

    def __init__(self, engine: AsyncLLMEngine, request_id: str, stream: _Stream) -> None:
        self._engine = engine
        self._request_id = request_id
        self._stream = stream
        self._is_done = False

    async def __anext__(self) -> RequestOutput:
        if self._is_done:
            raise StopAsyncIteration
        try:
            output = await self._stream.get()
        except BaseException:
            await self.aclose()
            raise
        self._is_done = output.is_finished
        return output

    async def aclose(self) -> None:
        """Stop reading. Aborts the request unless it has ended."""
        self._is_done = True
        self._engine.release(self._request_id)

    def __del__(self) -> None:
        # A consumer that was dropped without closing must not keep its request alive.
        if not self._is_done:
            self._engine.release(self._request_id)
