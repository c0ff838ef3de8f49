"""A real engine thread over a runner that a test can hold back, step by step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from peagle.engine.async_engine import AsyncLLMEngine
from peagle.engine.engine import LLMEngine, Runner
from peagle.outputs import ModelRunnerOutput, RequestInput, RequestOutput, SchedulerOutput
from tests.builders.engine import Answer, remake_engine
from tests.builders.server import DEADLINE_S, eventually


class GatedRunner:
    """A real runner behind a gate, which is open at first.

    Attributes:
        steps: seeds of the sequences of each step; a test that gives every request a seed knows it by that.
    """

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._permits = threading.Semaphore(0)
        self._is_open = True
        self._num_held = 0
        self.steps: list[list[int]] = []

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append([scheduled.seed for scheduled in step.scheduled])
        if not self._is_open:
            self._num_held += 1
            assert self._permits.acquire(timeout=DEADLINE_S), "the test forgot to open the gate"
        return self._inner.execute(step)

    def close(self) -> None:
        """Let no step through."""
        while self._permits.acquire(blocking=False):
            pass
        self._num_held = 0
        self._is_open = False

    def let_one_through(self) -> None:
        """Let one step through a closed gate."""
        self._permits.release()

    def open(self) -> None:
        """Let everything through again, also the step that waits."""
        self._is_open = True
        self._permits.release()

    async def holds(self, count: int = 1) -> None:
        """Wait until this many steps have been held since the gate was closed, so that the last of them waits."""
        await eventually(lambda: self._num_held >= count)


@contextmanager
def running(
    loaded: LLMEngine,
    *,
    max_num_requests: int = 64,
    wrap_runner: Callable[[Runner], Runner] = lambda runner: runner,
    **engine_options: Any,
) -> Iterator[tuple[AsyncLLMEngine, GatedRunner]]:
    """An asynchronous engine that is shut down in the end, and then must hold nothing any more."""
    gates: list[GatedRunner] = []

    def gate(runner: Runner) -> Runner:
        gates.append(GatedRunner(wrap_runner(runner)))
        return gates[0]

    sync_engine = remake_engine(loaded, wrap_runner=gate, **engine_options)
    engine = AsyncLLMEngine(sync_engine, max_num_requests=max_num_requests)
    try:
        yield engine, gates[0]
    finally:
        gates[0].open()
        engine.shutdown()
    if engine.health().error is None:
        sync_engine.check_integrity()
        assert not sync_engine.has_work
        assert engine.stats().kv_cache_usage == 0.0


async def collect(outputs: AsyncIterator[RequestOutput]) -> Answer:
    """The whole answer; fails instead of waiting for ever."""
    answer = Answer()
    async with asyncio.timeout(DEADLINE_S):
        async for output in outputs:
            answer.outputs.append(output)
    return answer


async def collect_all(engine: AsyncLLMEngine, requests: Iterable[RequestInput]) -> dict[str, Answer]:
    """Answers of requests that are all under way at once."""
    started = {request.request_id: engine.generate(request) for request in requests}
    answers = await asyncio.gather(*(collect(outputs) for outputs in started.values()))
    return dict(zip(started, answers, strict=True))
