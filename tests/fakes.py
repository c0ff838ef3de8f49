"""An engine that follows a script, for tests of the HTTP side: what it says and when is the test's choice.

Owns nothing real: no model, no thread. It keeps the contract of `peagle.engine.interface.Engine`, which the tests of
the real engine check for the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from peagle.engine.interface import EngineHealth
from peagle.errors import EngineOverloadedError
from peagle.outputs import RequestInput, RequestOutput, Usage
from peagle.sampling_params import SamplingParams
from peagle.sequence import FinishReason
from peagle.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Say:
    """One step: some text, as `num_tokens` tokens, after `delay_s`. `forever` repeats it until the request ends."""

    text: str
    num_tokens: int = 1
    delay_s: float = 0.0
    forever: bool = False


@dataclass(slots=True, eq=False)
class ScriptedEngine:
    """Answers every request with the same steps.

    Attributes:
        script: the steps. After the last one the request ends with `finish_reason`, on an output without text.
        refusal: raised by `generate` instead of admitting.
        failure: raised by the stream after the last step instead of ending.
        requests, ended_early, num_open: what was asked for, what was aborted, and how many requests are under way.
    """

    script: Sequence[Say] = (Say("Hello"), Say(" wor", num_tokens=3), Say("ld"))
    finish_reason: FinishReason = FinishReason.STOP
    error: str | None = None
    refusal: Exception | None = None
    failure: Exception | None = None
    max_model_len: int = 512
    max_num_requests: int = 100
    cached_tokens: int = 0
    snapshot: EngineStats = field(default_factory=EngineStats)
    is_alive: bool = True
    step_age_s: float = 0.0
    requests: list[RequestInput] = field(default_factory=list)
    ended_early: list[str] = field(default_factory=list)
    streams: dict[str, ScriptedStream] = field(default_factory=dict)
    was_shut_down: bool = False

    @property
    def num_open(self) -> int:
        return len(self.streams)

    def prepare(self, params: SamplingParams) -> None:
        """Nothing takes time here."""

    def generate(self, request: RequestInput) -> AsyncIterator[RequestOutput]:
        if self.refusal is not None:
            raise self.refusal
        if len(self.streams) >= self.max_num_requests:
            raise EngineOverloadedError("the queue is full")
        self.requests.append(request)
        self.streams[request.request_id] = ScriptedStream(self, request)
        return self.streams[request.request_id]

    def abort(self, request_id: str) -> None:
        if request_id in self.streams:
            self.streams[request_id].aborted.set()

    def health(self) -> EngineHealth:
        return EngineHealth(is_alive=self.is_alive, step_age_s=self.step_age_s)

    def stats(self) -> EngineStats:
        return self.snapshot

    def shutdown(self) -> None:
        self.was_shut_down = True


class ScriptedStream(AsyncIterator[RequestOutput]):
    """One request of a `ScriptedEngine`."""

    def __init__(self, engine: ScriptedEngine, request: RequestInput) -> None:
        self.aborted = asyncio.Event()
        self._engine = engine
        self._request = request
        self._steps = list(engine.script)
        self._num_tokens = 0

    async def __anext__(self) -> RequestOutput:
        if self._request.request_id not in self._engine.streams:
            raise StopAsyncIteration
        if not self._steps:
            if self._engine.failure is not None:
                self._end()
                raise self._engine.failure
            return self._last(self._engine.finish_reason)
        step = self._steps[0] if self._steps[0].forever else self._steps.pop(0)
        await self._pause(step.delay_s)
        if self.aborted.is_set():
            return self._last(FinishReason.ABORT)
        self._num_tokens += step.num_tokens
        return self._output(step.text, num_tokens=step.num_tokens)

    async def aclose(self) -> None:
        if self._request.request_id in self._engine.streams:
            self._engine.ended_early.append(self._request.request_id)
            self._end()

    async def _pause(self, delay_s: float) -> None:
        try:
            await asyncio.wait_for(self.aborted.wait(), delay_s)
        except TimeoutError:
            pass

    def _end(self) -> None:
        self._engine.streams.pop(self._request.request_id, None)

    def _last(self, reason: FinishReason) -> RequestOutput:
        self._end()
        return self._output("", num_tokens=0, finish_reason=reason)

    def _output(self, text: str, *, num_tokens: int, finish_reason: FinishReason | None = None) -> RequestOutput:
        return RequestOutput(
            request_id=self._request.request_id,
            text=text,
            token_ids=[0] * num_tokens,
            finish_reason=finish_reason,
            usage=Usage(
                prompt_tokens=len(self._request.prompt_token_ids),
                completion_tokens=self._num_tokens,
                cached_tokens=self._engine.cached_tokens,
            ),
            error=self._engine.error if finish_reason is FinishReason.ERROR else None,
        )
