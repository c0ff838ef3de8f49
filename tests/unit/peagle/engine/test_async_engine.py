"""Many clients, one engine thread: everyone gets an end, whatever happens on either side."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from peagle.engine.engine import LLMEngine
from peagle.errors import ContextLengthError, EngineOverloadedError, InvalidParameterError
from peagle.outputs import RequestInput
from peagle.sequence import FinishReason
from tests.builders.async_engine import collect, collect_all, running
from tests.builders.engine import ask, make_engine, make_request, remake_engine
from tests.builders.server import eventually

LONG = 50  # tokens; a request that is still under way when a test has done what it wants


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LLMEngine:
    return make_engine(checkpoint)


def numbered(index: int, *, max_tokens: int = 6, prompt: tuple[int, ...] = (1, 2, 3)) -> RequestInput:
    """A request that is known to the runner by its seed."""
    return make_request(f"{index}", (*prompt, index), temperature=1.0, seed=index, max_tokens=max_tokens)


async def test_many_clients_at_once_get_what_they_would_get_alone(loaded: LLMEngine) -> None:
    requests = [numbered(index, max_tokens=1 + index % 9) for index in range(60)]
    alone = {r.request_id: ask(remake_engine(loaded), r)[r.request_id] for r in requests[::6]}
    with running(loaded) as (engine, _):
        answers = await collect_all(engine, requests)
    for name, expected in alone.items():
        assert (answers[name].token_ids, answers[name].text) == (expected.token_ids, expected.text)
    for request in requests:
        answer = answers[request.request_id]
        assert (len(answer.token_ids), answer.finish_reason) == (request.params.max_tokens, FinishReason.LENGTH)


async def test_clients_that_come_and_go_at_random_leave_nothing_behind(loaded: LLMEngine) -> None:
    with running(loaded, num_blocks=24, max_num_batched_tokens=16) as (engine, _):

        async def client(index: int) -> None:
            await asyncio.sleep(index % 7 * 0.002)
            outputs: Any = engine.generate(numbered(index, max_tokens=20))
            for _ in range(index % 5):
                await outputs.__anext__()
            if index % 3 == 0:
                engine.abort(f"{index}")
            elif index % 3 == 1:
                await outputs.aclose()
            else:
                assert len((await collect(outputs)).token_ids) == 20 - index % 5

        await asyncio.gather(*(client(index) for index in range(60)))
        await eventually(lambda: engine.stats().num_running + engine.stats().num_waiting == 0)
        assert sum(engine.stats().requests_by_reason.values()) == 60


async def test_closing_early_ends_the_request_within_the_running_step(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, gate):
        gate.close()
        going: Any = engine.generate(numbered(1, max_tokens=LONG))
        staying = engine.generate(numbered(2, max_tokens=10))
        gate.let_one_through()
        await going.__anext__()
        await gate.holds(2)
        num_steps = len(gate.steps)
        await going.aclose()
        gate.open()
        assert len((await collect(staying)).token_ids) == 10
        assert all(1 not in seeds for seeds in gate.steps[num_steps:])
        assert len(gate.steps) > num_steps, "the other one went on"
        assert [output async for output in going] == []
        assert engine.stats().kv_cache_usage == 0.0


async def test_abort_gives_the_client_an_end(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, _):
        outputs: Any = engine.generate(numbered(1, max_tokens=LONG))
        first = await outputs.__anext__()
        engine.abort("1")
        engine.abort("1")
        engine.abort("unknown")
        answer = await collect(outputs)
        assert answer.finish_reason is FinishReason.ABORT
        assert answer.last.usage.completion_tokens == len(first.token_ids) + len(answer.token_ids)
        engine.abort("1")  # it has ended
        assert (await collect(engine.generate(numbered(2)))).finish_reason is FinishReason.LENGTH


async def test_abort_of_a_request_that_the_engine_has_not_taken_yet(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, gate):
        gate.close()
        other = engine.generate(numbered(1))
        await gate.holds()
        outputs = engine.generate(numbered(2))  # stays in the inbox while the step of the other one runs
        engine.abort("2")
        gate.open()
        answer = await collect(outputs)
        assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.ABORT)
        assert answer.last.usage.prompt_tokens == 4
        assert all(2 not in seeds for seeds in gate.steps)
        await collect(other)


async def test_a_client_that_was_cancelled_while_waiting_ends_its_request(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, gate):
        gate.close()
        waiting = asyncio.create_task(collect(engine.generate(numbered(1, max_tokens=LONG))))
        await gate.holds()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open()
        await eventually(lambda: engine.stats().requests_by_reason["abort"] == 1)


async def test_closing_wakes_whoever_waits_for_the_next_output(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, gate):
        gate.close()
        outputs: Any = engine.generate(numbered(1, max_tokens=LONG))
        waiting = asyncio.create_task(collect(outputs))
        await gate.holds()
        await outputs.aclose()
        assert (await waiting).outputs == []


@pytest.mark.parametrize("num_read", [0, 2])
async def test_a_client_that_forgot_to_close_ends_its_request(loaded: LLMEngine, num_read: int) -> None:
    with running(loaded) as (engine, gate):
        gate.close()
        outputs: Any = engine.generate(numbered(1, max_tokens=LONG))
        for _ in range(num_read):
            gate.let_one_through()
            await outputs.__anext__()
        await gate.holds(num_read + 1)
        holder = [outputs]
        del outputs
        # The garbage collector runs on any thread.
        dropping = threading.Thread(target=holder.clear)
        dropping.start()
        dropping.join()
        await asyncio.sleep(0)
        gate.open()
        await eventually(lambda: engine.stats().requests_by_reason["abort"] == 1)
        assert engine.stats().generation_tokens < LONG


async def test_a_client_that_read_to_the_end_and_closes_late_disturbs_no_one(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, _):
        first: Any = engine.generate(numbered(1))
        await collect(first)
        unread: Any = engine.generate(numbered(2))
        await eventually(lambda: engine.stats().requests_by_reason["length"] == 2)
        await asyncio.sleep(0)  # its outputs are here, though nobody has read them
        second = engine.generate(numbered(1))
        third = engine.generate(numbered(2))
        await first.aclose()
        await unread.aclose()
        for outputs in (second, third):
            assert (await collect(outputs)).finish_reason is FinishReason.LENGTH


async def test_an_id_is_taken_until_the_last_output_of_its_request_has_come(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, gate):
        gate.close()
        outputs: Any = engine.generate(numbered(1, max_tokens=LONG))
        await gate.holds()
        await outputs.aclose()
        with pytest.raises(InvalidParameterError, match="under way") as caught:
            engine.generate(numbered(1))
        assert caught.value.param == "request_id"
        gate.open()
        await eventually(lambda: engine.stats().requests_by_reason["abort"] == 1)
        await asyncio.sleep(0)
        answer = await collect(engine.generate(numbered(1, max_tokens=6)))
        assert (len(answer.token_ids), answer.finish_reason) == (6, FinishReason.LENGTH)


async def test_what_is_wrong_with_a_request_is_raised_by_the_call(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, gate):
        assert engine.max_model_len == 64
        with pytest.raises(ContextLengthError):
            engine.generate(numbered(1, max_tokens=61))
        with pytest.raises(InvalidParameterError):
            engine.generate(make_request("x", []))
        outputs = engine.generate(numbered(1))
        with pytest.raises(InvalidParameterError, match="under way"):
            engine.generate(numbered(1))
        await collect(outputs)
        assert all(seeds == [1] for seeds in gate.steps)


async def test_beyond_its_capacity_the_engine_refuses_until_a_request_ends(loaded: LLMEngine) -> None:
    with running(loaded, max_num_requests=2) as (engine, _):
        first, second = engine.generate(numbered(1, max_tokens=LONG)), engine.generate(numbered(2, max_tokens=LONG))
        with pytest.raises(EngineOverloadedError, match="2 requests"):
            engine.generate(numbered(3))
        engine.abort("1")
        await collect(first)
        third = engine.generate(numbered(3))
        assert (await collect(third)).finish_reason is FinishReason.LENGTH
        assert (await collect(second)).finish_reason is FinishReason.LENGTH


async def test_a_request_that_the_engine_refuses_after_all_ends_with_that_error(loaded: LLMEngine) -> None:
    """The door and the queue are sized alike by the loader; this is the case that they are not."""
    with running(loaded, max_num_seqs=1, max_num_queued_reqs=1) as (engine, gate):
        gate.close()
        first = engine.generate(numbered(1))
        await gate.holds()
        second, third = engine.generate(numbered(2)), engine.generate(numbered(3))
        gate.open()
        with pytest.raises(EngineOverloadedError):
            await collect(third)
        assert [output async for output in third] == []
        for outputs in (first, second):
            assert (await collect(outputs)).finish_reason is FinishReason.LENGTH
        assert (await collect(engine.generate(numbered(3)))).finish_reason is FinishReason.LENGTH


async def test_the_heartbeat_is_the_age_of_the_running_step(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, gate):
        assert engine.health().step_age_s == 0.0
        gate.close()
        outputs = engine.generate(numbered(1))
        await gate.holds()
        age = engine.health().step_age_s
        await eventually(lambda: engine.health().step_age_s > age + 0.02)
        second_began_after = time.monotonic()
        gate.let_one_through()
        await gate.holds(2)
        age = engine.health().step_age_s
        assert 0.0 < age <= time.monotonic() - second_began_after, "a finished step resets it"
        gate.open()
        await collect(outputs)
        await eventually(lambda: engine.health().step_age_s == 0.0)


async def test_the_heartbeat_sees_a_step_whose_request_came_while_the_last_one_ended(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, gate):
        gate.close()
        for index in range(1, 30):
            outputs = engine.generate(numbered(index, max_tokens=1))
            await gate.holds(index)
            await asyncio.sleep(0)
            assert engine.health().step_age_s > 0.0
            gate.let_one_through()
            await collect(outputs)


async def test_one_wake_up_of_the_event_loop_for_each_step(loaded: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    wake_ups: list[object] = []
    call = loop.call_soon_threadsafe

    def counting(*args: Any, **options: Any) -> asyncio.Handle:
        wake_ups.append(args[0])
        return call(*args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    with running(loaded) as (engine, gate):
        gate.close()
        started = [engine.generate(numbered(index, max_tokens=9)) for index in range(1, 7)]
        gate.open()
        await asyncio.gather(*(collect(outputs) for outputs in started))
        assert len(wake_ups) == len(gate.steps) < 6 * 9


async def test_whoever_has_an_answer_finds_it_counted_and_snapshots_stay_as_they_were(loaded: LLMEngine) -> None:
    with running(loaded) as (engine, _):
        for index in range(20):
            before = engine.stats()
            await collect(engine.generate(numbered(index, max_tokens=2)))
            assert before.requests_by_reason["length"] == index
            assert engine.stats().requests_by_reason["length"] == index + 1
            assert engine.stats().generation_tokens == before.generation_tokens + 2
