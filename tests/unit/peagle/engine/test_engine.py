"""The engine says what the unmodified model says, whoever else is there and however little memory it has."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.engine import LLMEngine
from peagle.errors import ContextLengthError, IntegrityError, InvalidParameterError
from peagle.outputs import RequestInput
from peagle.sampling_params import SamplingParams
from peagle.sequence import FinishReason
from tests.builders.engine import (
    MAX_MODEL_LEN,
    Arrival,
    ask,
    greedy_reference,
    make_engine,
    make_request,
    play,
    remake_engine,
)

NUM_TOKENS = 12
# Of many lengths around the block size of 4, some with a prefix in common.
PROMPTS = tuple([(7 * text + i * i) % 300 for i in range(length)] for text in range(2) for length in (1, 4, 5, 13, 30))


@dataclass(frozen=True, kw_only=True)
class Known:
    """An engine to remake, and what the unmodified model answers to `PROMPTS`."""

    engine: LLMEngine
    answers: list[list[int]]


@pytest.fixture(scope="module")
def known(checkpoint: Path) -> Known:
    return Known(engine=make_engine(checkpoint), answers=greedy_reference(checkpoint, PROMPTS, num_tokens=NUM_TOKENS))


@pytest.fixture
def engine(known: Known) -> LLMEngine:
    return remake_engine(known.engine)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, 25),
        st.none() | st.integers(0, 20),
        st.integers(1, NUM_TOKENS),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=100, deadline=None)
@given(
    drawn=ARRIVALS,
    max_num_batched_tokens=st.sampled_from([3, 8, 64]),
    max_num_seqs=st.sampled_from([1, 3]),
    num_blocks=st.sampled_from([16, 17, 20, 96]),
)
def test_greedy_answers_are_those_of_the_unmodified_model(
    known: Known,
    drawn: list[tuple[int, int, int | None, int]],
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_blocks: int,
) -> None:
    engine = remake_engine(
        known.engine,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    arrivals = [
        Arrival(
            request=make_request(f"{index}", PROMPTS[text], max_tokens=max_tokens),
            step=step,
            abort_step=None if wait is None else step + wait,
        )
        for index, (text, step, wait, max_tokens) in enumerate(drawn)
    ]
    answers = play(engine, arrivals)
    for index, (text, _, wait, max_tokens) in enumerate(drawn):
        answer = answers[f"{index}"]
        expected = known.answers[text][:max_tokens]
        if answer.finish_reason is FinishReason.ABORT:
            assert wait is not None
            assert answer.token_ids == expected[: len(answer.token_ids)]
        else:
            assert (answer.token_ids, answer.finish_reason) == (expected, FinishReason.LENGTH)
        assert answer.last.usage.completion_tokens == len(answer.token_ids)
        assert answer.last.usage.prompt_tokens == len(PROMPTS[text])


def test_a_pool_that_is_far_too_small_preempts_and_changes_nothing(known: Known) -> None:
    engine = remake_engine(known.engine, num_blocks=17, max_num_batched_tokens=16)
    indices = [index for index, prompt in enumerate(PROMPTS) if len(prompt) <= 13]
    answers = ask(engine, *(make_request(f"{index}", PROMPTS[index], max_tokens=NUM_TOKENS) for index in indices))
    assert {int(name): answer.token_ids for name, answer in answers.items()} == {i: known.answers[i] for i in indices}
    assert engine.stats().num_preemptions > 0


def test_an_abort_takes_effect_at_once_and_frees_everything(engine: LLMEngine) -> None:
    engine.add_request(make_request("running", max_tokens=40))
    engine.step()
    engine.add_request(make_request("waiting"))
    for name, num_tokens in (("running", 1), ("waiting", 0)):
        output = engine.abort(name)
        assert output is not None
        assert output.finish_reason is FinishReason.ABORT
        assert output.usage.completion_tokens == num_tokens
        assert engine.abort(name) is None
        engine.check_integrity()
    assert engine.abort("unknown") is None
    assert not engine.has_work
    assert engine.stats().kv_cache_usage == 0.0
    assert engine.step() == []


def test_abort_all_ends_running_and_waiting_requests(known: Known) -> None:
    engine = remake_engine(known.engine, max_num_seqs=1)
    for name in ("a", "b"):
        engine.add_request(make_request(name))
    engine.step()
    assert [(o.request_id, o.finish_reason) for o in engine.abort_all()] == [("a", "abort"), ("b", "abort")]
    engine.check_integrity()
    assert not engine.has_work


def test_an_id_may_be_used_again_once_its_request_has_ended(engine: LLMEngine) -> None:
    engine.add_request(make_request("x"))
    with pytest.raises(InvalidParameterError, match="under way") as caught:
        engine.add_request(make_request("x"))
    assert caught.value.param == "request_id"
    engine.abort("x")
    assert ask(engine, make_request("x"))["x"].finish_reason is FinishReason.LENGTH


def sampled(name: str, *, seed: int | None, prompt: tuple[int, ...] = (5, 6, 7)) -> RequestInput:
    return make_request(name, prompt, temperature=1.0, seed=seed, max_tokens=10)


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_after_preemption(known: Known) -> None:
    alone = ask(remake_engine(known.engine), sampled("x", seed=42))["x"].token_ids
    crowd = [sampled(f"{index}", seed=index, prompt=(5, 6, 7, *range(index))) for index in range(12)]
    engine = remake_engine(known.engine, num_blocks=17, max_num_batched_tokens=9)
    answers = ask(engine, *crowd, sampled("x", seed=42))
    assert engine.stats().num_preemptions > 0
    assert answers["x"].token_ids == alone
    assert answers["0"].token_ids != alone, "another seed"


def test_requests_without_a_seed_differ_and_an_engine_with_the_same_seed_repeats_them(known: Known) -> None:
    def answers(*seeds: int | None, engine_seed: int = 1) -> list[list[int]]:
        engine = remake_engine(known.engine, parts={"seed": engine_seed})
        requests = [sampled(f"{index}", seed=seed) for index, seed in enumerate(seeds)]
        return [answer.token_ids for answer in ask(engine, *requests).values()]

    first, second = answers(None, None)
    assert first != second
    assert answers(None, None) == [first, second]
    assert answers(7, None)[1] == second, "does not depend on what others brought"
    assert answers(None, engine_seed=2) != [first]


def test_an_answer_without_a_limit_ends_at_the_end_of_the_context(engine: LLMEngine) -> None:
    prompt = list(range(100, 100 + MAX_MODEL_LEN - 3))
    answer = ask(engine, make_request("x", prompt, max_tokens=None))["x"]
    assert (len(answer.token_ids), answer.finish_reason) == (3, FinishReason.LENGTH)


def test_the_checkpoints_end_of_sequence_ids_end_an_answer_unless_they_are_ignored(
    known: Known, checkpoint: Path, tmp_path: Path
) -> None:
    expected = known.answers[3]
    eos = next(token_id for token_id in expected[2:] if token_id not in expected[:2])
    directory = tmp_path / "with-eos"
    shutil.copytree(checkpoint, directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    engine = make_engine(directory)
    answers = ask(
        engine,
        make_request("ends", PROMPTS[3], ignore_eos=False, max_tokens=NUM_TOKENS),
        make_request("goes on", PROMPTS[3], max_tokens=NUM_TOKENS),
    )
    assert answers["ends"].token_ids == expected[: expected.index(eos) + 1]
    assert answers["ends"].finish_reason is FinishReason.STOP
    assert answers["ends"].last.stop_reason == eos
    assert answers["goes on"].token_ids == expected


def test_a_stop_string_ends_the_sequence_in_the_scheduler_too(known: Known, engine: LLMEngine) -> None:
    text = ask(engine, make_request("x", PROMPTS[3], max_tokens=NUM_TOKENS))["x"].text
    stop = next(char for char in text[2:] if char not in text[:2] and char != "\ufffd")
    answer = ask(engine, make_request("x", PROMPTS[3], stop=(stop,)))["x"]  # `ask` checks that no block is left
    assert answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.last.stop_reason) == (FinishReason.STOP, stop)
    assert answer.token_ids == known.answers[3][: len(answer.token_ids)]


def test_cached_tokens_are_told_in_usage(known: Known, engine: LLMEngine) -> None:
    first, second = (ask(engine, make_request("x", PROMPTS[3], max_tokens=4))["x"] for _ in range(2))
    assert first.last.usage.cached_tokens == 0
    assert second.last.usage.cached_tokens == 12, "all full blocks of 13 tokens"
    assert first.token_ids == second.token_ids == known.answers[3][:4]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "code", "told"),
    [
        ([], None, InvalidParameterError, "invalid_value", "empty"),
        ([1, 300], None, InvalidParameterError, "invalid_value", "vocabulary"),
        ([1, -1], None, InvalidParameterError, "invalid_value", "vocabulary"),
        ([1] * MAX_MODEL_LEN, None, ContextLengthError, "context_length_exceeded", "64 tokens"),
        ([1] * 60, 5, ContextLengthError, "context_length_exceeded", "65 tokens"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused(
    engine: LLMEngine,
    prompt: list[int],
    max_tokens: int | None,
    error: type[InvalidParameterError | ContextLengthError],
    code: str,
    told: str,
) -> None:
    with pytest.raises(error, match=told) as caught:
        engine.add_request(make_request("x", prompt, max_tokens=max_tokens))
    assert (caught.value.param, caught.value.code) == ("messages", code)
    assert not engine.has_work
    engine.check_integrity()


def test_the_longest_request_that_fits_is_taken(engine: LLMEngine) -> None:
    assert engine.check_request(make_request("x", [1] * 60, max_tokens=4)) == MAX_MODEL_LEN
    assert engine.check_request(make_request("x", [1] * 63, max_tokens=None)) == MAX_MODEL_LEN
    assert engine.check_request(make_request("x", [1, 2], max_tokens=3)) == 5


def test_time_is_taken_from_the_clock_that_was_given(known: Known) -> None:
    now = iter(range(1000))
    engine = remake_engine(known.engine, parts={"clock": lambda: float(next(now))})
    early = replace(make_request("early", max_tokens=1), arrival_time=0.5)
    engine.add_request(early)  # its own time counts, no look at the clock
    engine.step()  # scheduled at 0, done at 1
    stats = engine.stats()
    assert stats.time_to_first_token_s.total == 0.5
    assert stats.e2e_request_latency_s.total == 0.5
    assert stats.last_step_time == 1.0
    engine.add_request(make_request("late", max_tokens=1))  # arrives at 2
    engine.step()  # scheduled at 3, done at 4
    assert engine.stats().time_to_first_token_s.total == 0.5 + 2.0


def test_a_snapshot_of_the_counters_stays_as_it_was(engine: LLMEngine) -> None:
    ask(engine, make_request("x"))
    before, copy = engine.stats(), engine.stats()
    ask(engine, make_request("y", PROMPTS[4]), make_request("z", PROMPTS[4]))
    assert before == copy
    after = engine.stats()
    assert after.requests_by_reason["length"] == 3
    assert after.generation_tokens == 24
    assert after.prompt_tokens == 3 + 2 * len(PROMPTS[4])
    assert after.num_steps > before.num_steps


def test_the_self_check_finds_a_sequence_that_nobody_asked_for(engine: LLMEngine) -> None:
    engine.add_request(make_request("x"))
    engine._scheduler.abort(0)
    with pytest.raises(IntegrityError, match="0 sequences are scheduled, 1 have text"):
        engine.check_integrity()


def test_default_sampling_is_not_greedy(engine: LLMEngine) -> None:
    prompt = [5, 6, 7]
    requests = [
        RequestInput(request_id=f"{i}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=6)) for i in range(4)
    ]
    assert len({tuple(answer.token_ids) for answer in ask(engine, *requests).values()}) == 4
