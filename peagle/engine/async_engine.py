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
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from peagle.engine.engine import LLMEngine
from peagle.engine.interface import EndListener, EngineHealth
from peagle.engine.request_stream import RequestStream
from peagle.errors import EngineDeadError, EngineOverloadedError, InvalidParameterError, PeagleError
from peagle.outputs import RequestInput, RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.sequence import FinishReason
from peagle.stats import EngineStats

logger = logging.getLogger(__name__)

# How old a snapshot may become while steps run: making one costs 25 us, which short steps should not pay each time.
_SNAPSHOT_AGE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Delivery:
    """What one step has for one request: an output, or the error that refused it."""

    request_id: str
    item: RequestOutput | PeagleError

    @property
    def is_last(self) -> bool:
        return isinstance(self.item, PeagleError) or self.item.is_finished


class AsyncLLMEngine:
    """See `interface.Engine`.

    Args:
        engine: driven by this object's thread from now on; nobody else may call it.
        max_num_requests: most requests under way, running and waiting; more are refused at the door.
        on_end: called on the event loop with the last output of every request, in the context of its `generate`.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        max_num_requests: int,
        on_end: EndListener = lambda output: None,
    ) -> None:
        self._engine = engine
        self._max_num_requests = max_num_requests
        self._on_end = on_end
        self._wake = threading.Condition()
        self._inbox: deque[RequestInput | _Abort] = deque()  # guarded by _wake, like the two flags
        self._is_stopping = False
        self._is_closed = False  # the inbox takes nothing any more, and everything in it has been answered
        self._streams: dict[str, RequestStream] = {}  # one until the last output of its request has come, read or not
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: str | None = None
        self._busy_since: float | None = None
        self._stats, self._stats_at = engine.stats(), time.monotonic()
        self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
        self._thread.start()

    # -- event loop only ---------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        return self._engine.max_model_len

    def prepare(self, params: SamplingParams) -> None:
        """See `interface.Engine.prepare`."""
        self._engine.prepare(params)

    def generate(self, request: RequestInput) -> AsyncIterator[RequestOutput]:
        """Admit a request and stream its outputs. See `interface.Engine.generate`."""
        if self._is_stopping or self._is_closed:
            raise self._dead_error()
        self._engine.check_request(request)
        if request.request_id in self._streams:
            raise InvalidParameterError(f"request id {request.request_id!r} is already under way", param="request_id")
        if len(self._streams) >= self._max_num_requests:
            raise EngineOverloadedError(f"{len(self._streams)} requests are under way already; try again later")
        self._loop = asyncio.get_running_loop()
        if not self._post(request):  # it ended just now
            raise self._dead_error()
        stream = self._streams[request.request_id] = RequestStream(len(request.prompt_token_ids))
        return _Consumer(self, request.request_id, stream)

    def abort(self, request_id: str) -> None:
        """End a request within one step."""
        if request_id in self._streams:
            self._post(_Abort(request_id))

    def health(self) -> EngineHealth:
        """State of the engine thread."""
        busy_since = self._busy_since
        age = 0.0 if busy_since is None else time.monotonic() - busy_since
        is_alive = self._thread.is_alive() and not self._is_closed
        return EngineHealth(is_alive=is_alive, step_age_s=age, error=self._error)

    def stats(self) -> EngineStats:
        """A snapshot, at most 50 ms and a step old. Whoever has a last output finds it counted."""
        return self._stats

    def shutdown(self) -> None:
        """Stop the thread; requests under way end with ABORT. The only method that may be called from any thread."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    def release(self, request_id: str, stream: RequestStream) -> None:
        """The consumer has gone: close its stream, and abort the request if it has not ended.

        The id stays taken until the request's last output has come, so that no later request gets what is left of it.
        """
        stream.close()
        if self._streams.get(request_id) is stream:
            self._post(_Abort(request_id))

    def release_from_any_thread(self, request_id: str, stream: RequestStream) -> None:
        """As `release`, for the garbage collector, which runs on the thread that happens to be allocating."""
        if not self._call_soon(self.release, request_id, stream):
            self.release(request_id, stream)  # without a loop there is nobody to get in the way of

    def _dead_error(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has ended: {self._error or 'it was shut down'}")

    def _deliver(self, deliveries: list[_Delivery]) -> None:
        for delivery in deliveries:
            stream = self._streams.get(delivery.request_id)
            if stream is None:
                continue  # it was ended together with the loop it belonged to
            stream.put(delivery.item)
            if delivery.is_last:
                del self._streams[delivery.request_id]
                self._tell_end(stream, delivery.item)

    def _end_streams(self, reason: FinishReason) -> None:
        """The thread has ended, and the inbox is closed: end every stream that has not had its last output."""
        streams, self._streams = self._streams, {}
        error = "the engine has ended" if reason is FinishReason.ERROR else None
        for request_id, stream in streams.items():
            last = RequestOutput(
                request_id=request_id,
                text="",
                token_ids=[],
                finish_reason=reason,
                usage=stream.usage,
                error=error,
            )
            stream.put(last)
            self._tell_end(stream, last)

    def _tell_end(self, stream: RequestStream, item: RequestOutput | PeagleError) -> None:
        if isinstance(item, RequestOutput):
            stream.context.run(self._on_end, item)

    # -- both sides --------------------------------------------------------------------------------------------------

    def _post(self, message: RequestInput | _Abort) -> bool:
        """Put a message into the inbox; False if the thread has ended."""
        with self._wake:
            if self._is_closed:
                return False
            self._inbox.append(message)
            if self._busy_since is None:
                self._busy_since = time.monotonic()
            self._wake.notify()
            return True

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> bool:
        """Run something on the event loop; False if there is none, or it is closed."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # it is closed
            return False
        return True

    # -- engine thread only ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = FinishReason.ABORT
        try:
            while self._wait_for_work():
                self._send(
                    self._take_inbox() + [_Delivery(output.request_id, output) for output in self._engine.step()]
                )
            self._send([_Delivery(output.request_id, output) for output in self._engine.abort_all()])
        except BaseException as error:  # isolation of steps should have prevented it
            self._error = f"{type(error).__name__}: {error}"
            reason = FinishReason.ERROR
            logger.critical("the engine has ended", exc_info=error)
        finally:
            with self._wake:
                self._is_closed = True
                self._inbox.clear()
                self._busy_since = None
            self._call_soon(self._end_streams, reason)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False once the engine is to stop."""
        with self._wake:
            while not (self._inbox or self._engine.has_work or self._is_stopping):
                self._busy_since = None
                self._wake.wait()
            # The heartbeat: its age is that of the step which begins now.
            self._busy_since = time.monotonic()
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
                    deliveries.append(_Delivery(message.request_id, aborted))
                continue
            try:
                self._engine.add_request(message)
            except PeagleError as error:
                deliveries.append(_Delivery(message.request_id, error))
        return deliveries

    def _send(self, deliveries: list[_Delivery]) -> None:
        now = time.monotonic()
        is_due = now - self._stats_at >= _SNAPSHOT_AGE_S or not self._engine.has_work
        if is_due or any(delivery.is_last for delivery in deliveries):
            # First, so that whoever has an answer finds it counted.
            self._stats, self._stats_at = self._engine.stats(), now
        if not deliveries or self._call_soon(self._deliver, deliveries):
            return
        logger.warning("the event loop is closed; %d outputs have no reader", len(deliveries))
        for delivery in deliveries:
            if delivery.is_last:
                self._streams.pop(delivery.request_id, None)


class _Consumer(AsyncIterator[RequestOutput]):
    """The outputs of one request; leaving it early aborts the request."""

    def __init__(self, engine: AsyncLLMEngine, request_id: str, stream: RequestStream) -> None:
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
        if output is None:  # closed while this waited
            raise StopAsyncIteration
        self._is_done = output.is_finished
        return output

    async def aclose(self) -> None:
        """Stop reading. Aborts the request unless it has ended."""
        self._is_done = True
        self._engine.release(self._request_id, self._stream)

    def __del__(self) -> None:
        # A consumer that was dropped without closing must not keep its request alive.
        if not self._is_done:
            self._engine.release_from_any_thread(self._request_id, self._stream)
