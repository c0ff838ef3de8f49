"""A request that breaks its step fails alone: everyone else gets exactly the tokens they would have got."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from peagle.engine.engine import LLMEngine, Runner
from peagle.outputs import ModelRunnerOutput, RequestInput, SchedulerOutput
from peagle.sequence import FinishReason
from peagle.spec_config import SpecConfig
from tests.builders.engine import Answer, Arrival, ask, make_engine, make_request, play, remake_engine
from tests.builders.head import TINY_TARGET, write_tiny_head

NUM_REQUESTS = 6
NOT_A_NUMBER = 299  # a token whose embedding is broken in `broken_checkpoint`


class FailingRunner:
    """A real runner that raises for some steps, before or after the device has done its work.

    Args:
        inner: the real one.
        fails: tells which steps raise.
        is_late: run the step first, so that its writes to the cache are there.
    """

    def __init__(self, inner: Runner, fails: Callable[[SchedulerOutput], bool], *, is_late: bool = False) -> None:
        self._inner = inner
        self._fails = fails
        self._is_late = is_late
        self.num_failures = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if not self._fails(step):
            return self._inner.execute(step)
        if self._is_late:
            self._inner.execute(step)
        self.num_failures += 1
        raise RuntimeError("index 7 is out of bounds in a kernel")


def failing(
    fails: Callable[[SchedulerOutput], bool], *, is_late: bool = False
) -> tuple[Callable[[Runner], Runner], list[FailingRunner]]:
    """For `remake_engine`, and where the runner is found afterwards."""
    made: list[FailingRunner] = []

    def wrap(runner: Runner) -> Runner:
        made.append(FailingRunner(runner, fails, is_late=is_late))
        return made[-1]

    return wrap, made


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "speculating"])
def loaded(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    depth: int = request.param
    if depth == 0:
        return make_engine(checkpoint)
    head = write_tiny_head(tmp_path_factory.mktemp("head") / "head", TINY_TARGET)
    return make_engine(checkpoint, spec=SpecConfig(model=str(head), num_speculative_tokens=depth))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="peagle")


def request_of(index: int) -> RequestInput:
    prompt = [(index * 31 + i * i) % 272 for i in range(3 + 5 * index)]
    return make_request(f"{index}", prompt, temperature=float(index % 2), seed=index, max_tokens=10)


REQUESTS = [request_of(index) for index in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def alone(loaded: LLMEngine) -> list[list[int]]:
    """Tokens of each request on an engine of its own."""
    return [ask(remake_engine(loaded), request)[request.request_id].token_ids for request in REQUESTS]


def check_failure(answer: Answer) -> None:
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.last.error == "the engine failed on this request (RuntimeError)", "no insides for the client"
    assert answer.last.usage.completion_tokens == len(answer.token_ids)


@settings(max_examples=25, deadline=None)
@given(
    arrival_steps=st.lists(st.integers(0, 12), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    poisoned=st.sets(st.integers(0, NUM_REQUESTS - 1), min_size=1, max_size=3),
    first_bad_position=st.integers(0, 25),
    is_late=st.booleans(),
    num_blocks=st.sampled_from([17, 96]),
)
def test_poisoned_requests_fail_and_nobody_else_notices(
    loaded: LLMEngine,
    alone: list[list[int]],
    arrival_steps: list[int],
    poisoned: set[int],
    first_bad_position: int,
    is_late: bool,
    num_blocks: int,
) -> None:
    """A request is known to the runner by its seed."""

    def is_poisoned(step: SchedulerOutput) -> bool:
        return any(s.seed in poisoned and s.start + len(s.token_ids) > first_bad_position for s in step.scheduled)

    wrap, _ = failing(is_poisoned, is_late=is_late)
    engine = remake_engine(loaded, wrap_runner=wrap, num_blocks=num_blocks, max_num_batched_tokens=24)
    arrivals = [Arrival(request=r, step=step) for r, step in zip(REQUESTS, arrival_steps, strict=True)]
    answers = play(engine, arrivals)
    for index, expected in enumerate(alone):
        answer = answers[f"{index}"]
        if answer.finish_reason is FinishReason.ERROR:
            assert index in poisoned
            check_failure(answer)
            assert answer.token_ids == expected[: len(answer.token_ids)]
        else:
            assert (answer.token_ids, answer.finish_reason) == (expected, FinishReason.LENGTH)
            # the last token is never a row, so a poisoned request may have ended before its bad position
            assert index not in poisoned or len(REQUESTS[index].prompt_token_ids) + 9 <= first_bad_position
    assert engine.stats().requests_by_reason["error"] == sum(a.last.error is not None for a in answers.values())


@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_that_only_fails_in_company_costs_nobody_anything(
    loaded: LLMEngine, alone: list[list[int]], is_late: bool
) -> None:
    wrap, made = failing(lambda step: len(step.scheduled) > 1, is_late=is_late)
    answers = ask(remake_engine(loaded, wrap_runner=wrap), *REQUESTS)
    assert [answers[f"{index}"].token_ids for index in range(NUM_REQUESTS)] == alone
    assert made[0].num_failures > 0


def test_one_failure_that_does_not_come_again_costs_nobody_anything(loaded: LLMEngine, alone: list[list[int]]) -> None:
    steps = iter(range(10_000))
    wrap, made = failing(lambda _: next(steps) == 3, is_late=True)
    answers = ask(remake_engine(loaded, wrap_runner=wrap), *REQUESTS)
    assert [answers[f"{index}"].token_ids for index in range(NUM_REQUESTS)] == alone
    assert made[0].num_failures == 1


def test_a_device_that_fails_every_step_fails_every_request_and_leaves_nothing_behind(loaded: LLMEngine) -> None:
    wrap, _ = failing(lambda _: True)
    engine = remake_engine(loaded, wrap_runner=wrap)
    for answer in ask(engine, *REQUESTS).values():
        check_failure(answer)
        assert len(answer.outputs) == 1
    assert engine.stats().requests_by_reason == {"stop": 0, "length": 0, "abort": 0, "error": NUM_REQUESTS}


@pytest.fixture(scope="module")
def broken_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with an embedding that is not a number for one token that nothing else says."""
    directory = tmp_path_factory.mktemp("broken") / "tiny"
    shutil.copytree(checkpoint, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][NOT_A_NUMBER] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("max_num_batched_tokens", [8, 64], ids=["in chunks", "whole"])
def test_a_request_whose_numbers_overflow_fails_alone(broken_checkpoint: Path, max_num_batched_tokens: int) -> None:
    loaded = make_engine(broken_checkpoint)
    good = [make_request(f"{i}", [i + 1] * (5 * i + 2), stop_token_ids=frozenset({NOT_A_NUMBER})) for i in range(4)]
    alone = {r.request_id: ask(remake_engine(loaded), r)[r.request_id].token_ids for r in good}
    bad = [make_request(f"bad {i}", [9] * (7 * i) + [NOT_A_NUMBER] + [4] * (i // 2 * 6)) for i in range(4)]
    # Few blocks and many rounds, so that each block has belonged to a broken request before.
    engine = remake_engine(loaded, num_blocks=20, max_num_batched_tokens=max_num_batched_tokens)
    for _ in range(5):
        answers = ask(engine, *(request for pair in zip(good, bad, strict=True) for request in pair))
        assert {request.request_id: answers[request.request_id].token_ids for request in good} == alone
        for request in bad:
            answer = answers[request.request_id]
            assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.ERROR)
            assert answer.last.error is not None
            assert "are not numbers" in answer.last.error
