"""How an engine thread ends: on request, by a bug, or without an event loop. No client waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.engine.async_engine import AsyncLLMEngine
from peagle.engine.engine import LLMEngine, Runner
from peagle.errors import DeviceLostError, EngineDeadError
from peagle.outputs import ModelRunnerOutput, RequestOutput, SchedulerOutput
from peagle.sequence import FinishReason
from tests.builders.async_engine import collect, running
from tests.builders.engine import make_engine, make_request, remake_engine
from tests.builders.server import eventually, eventually_sync

LONG = 50


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LLMEngine:
    return make_engine(checkpoint)


class Breaking:
    """A runner that does something terrible from its third step on."""

    def __init__(self, inner: Runner, act: Callable[[ModelRunnerOutput], ModelRunnerOutput]) -> None:
        self._inner = inner
        self._act = act
        self._num_steps = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._num_steps += 1
        outputs = self._inner.execute(step)
        return self._act(outputs) if self._num_steps >= 3 else outputs


async def test_shutdown_ends_running_waiting_and_unseen_requests(loaded: LLMEngine) -> None:
    with running(loaded, max_num_seqs=1) as (engine, gate):
        gate.close()
        running_one: Any = engine.generate(make_request("running", max_tokens=LONG))
        gate.let_one_through()
        first = await running_one.__anext__()
        waiting = engine.generate(make_request("waiting"))
        await gate.holds(2)
        unseen = engine.generate(make_request("unseen", [1, 2]))
        stopping = threading.Thread(target=engine.shutdown)
        stopping.start()
        await eventually(lambda: engine._is_stopping)
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.generate(make_request("late"))
        assert engine.health().is_alive, "it waits for the step"
        gate.open()
        answers = [await collect(outputs) for outputs in (running_one, waiting, unseen)]
        stopping.join()
        assert [answer.finish_reason for answer in answers] == [FinishReason.ABORT] * 3
        num_tokens = len(first.token_ids) + len(answers[0].token_ids)
        assert answers[0].last.usage.completion_tokens == num_tokens
        assert answers[2].last.usage.prompt_tokens == 2
        health = engine.health()
        assert (health.is_alive, health.step_age_s, health.error) == (False, 0.0, None)
        engine.shutdown()
        engine.abort("running")
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.generate(make_request("late"))


async def test_shutdown_of_an_engine_that_never_had_a_request(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, _):
        assert engine.health().is_alive
    assert not engine.health().is_alive


def ask_until_refused(
    engine: AsyncLLMEngine, actions: dict[int, Callable[[], None]]
) -> list[AsyncIterator[RequestOutput]]:
    """Start requests as fast as can be, with an action after some number of them."""
    started: list[AsyncIterator[RequestOutput]] = []
    while True:
        try:
            started.append(engine.generate(make_request(f"{len(started)}", max_tokens=LONG)))
        except EngineDeadError:
            return started
        actions.get(len(started), lambda: None)()


async def test_requests_that_race_with_a_shutdown_are_refused_or_end(loaded: LLMEngine) -> None:
    for round_number in range(60):
        with running(loaded, max_num_requests=100_000) as (engine, _):
            stopping = threading.Thread(target=engine.shutdown)
            started = ask_until_refused(engine, {round_number + 1: stopping.start})
            answers = await asyncio.gather(*(collect(outputs) for outputs in started))
            stopping.join()
        assert {answer.finish_reason for answer in answers} <= {FinishReason.ABORT, FinishReason.LENGTH}


def lose_the_device(outputs: ModelRunnerOutput) -> ModelRunnerOutput:
    raise DeviceLostError("an illegal memory access was encountered")


def exit_process(_: ModelRunnerOutput) -> ModelRunnerOutput:
    raise SystemExit("told to go")


def forget_everything(_: ModelRunnerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(outputs=())


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (exit_process, "SystemExit: told to go"),
        (forget_everything, "AssertionError: "),
        (lose_the_device, "DeviceLostError: "),
    ],
    ids=["beyond Exception", "a bug outside the isolation", "a device that is gone"],
)
async def test_a_dead_engine_ends_everyone_and_says_why(
    loaded: LLMEngine, act: Callable[[ModelRunnerOutput], ModelRunnerOutput], error: str
) -> None:
    with running(loaded, max_num_seqs=2, wrap_runner=lambda inner: Breaking(inner, act)) as (engine, gate):
        gate.close()
        started = [engine.generate(make_request(f"{index}", max_tokens=LONG)) for index in range(4)]
        gone: Any = engine.generate(make_request("gone"))
        for _ in range(2):
            gate.let_one_through()
        await gate.holds(3)
        await gone.aclose()
        started.append(engine.generate(make_request("unseen")))
        gate.open()
        answers = [await collect(outputs) for outputs in started]
        for answer in answers:
            assert answer.finish_reason is FinishReason.ERROR
            assert answer.last.error == "the engine has ended", "no insides for the client"
            assert answer.last.usage.prompt_tokens == 3
            assert answer.last.usage.completion_tokens == len(answer.token_ids)
        assert len(answers[0].token_ids) == 2
        health = engine.health()
        assert not health.is_alive
        assert health.step_age_s == 0.0
        assert (health.error or "").startswith(error)
        with pytest.raises(EngineDeadError, match=error):
            engine.generate(make_request("late"))
        engine.abort("0")
        engine.shutdown()


async def test_outputs_of_the_step_in_which_the_engine_died_are_not_waited_for(
    loaded: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may have ended in the books just before the bug: its client must get an end all the same."""
    sync_engine = remake_engine(loaded)
    step = sync_engine.step

    def step_and_break() -> list[Any]:
        step()
        raise ZeroDivisionError

    monkeypatch.setattr(sync_engine, "step", step_and_break)
    engine = AsyncLLMEngine(sync_engine, max_num_requests=4)
    answer = await collect(engine.generate(make_request("x", max_tokens=1)))
    assert answer.finish_reason is FinishReason.ERROR
    engine.shutdown()


def test_an_engine_outlives_its_event_loop(loaded: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Any] = []
    with running(loaded, max_num_requests=2) as (engine, gate):

        async def leave() -> None:
            gate.close()
            kept.append(engine.generate(make_request("kept", max_tokens=4)))
            engine.generate(make_request("dropped", max_tokens=LONG))
            await gate.holds()

        asyncio.run(leave())
        gate.open()
        reasons = {"stop": 0, "length": 1, "abort": 1, "error": 0}
        eventually_sync(lambda: engine.stats().requests_by_reason == reasons)
        eventually_sync(lambda: engine.health().step_age_s == 0.0)  # what was counted is cleared away, too
        assert "no reader" in caplog.text

        async def come_back() -> None:
            for name in ("kept", "dropped"):  # their ids and places are free again
                assert (await collect(engine.generate(make_request(name)))).finish_reason is FinishReason.LENGTH

        asyncio.run(come_back())
    kept.clear()
