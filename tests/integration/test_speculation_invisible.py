"""The promise: speculation is invisible, except in speed.

A tiny target and a head trained on it, in float64. Random scenarios (arrivals, cancellations, pools too small for all,
token budgets, K, drafters, sampling parameters) run with speculation, and every request must give token for token what
it gives alone, without speculation and with memory to spare. After each scenario the bookkeeping is checked and no
block is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle import (
    CacheConfig,
    EngineConfig,
    FinishReason,
    LLMEngine,
    ModelConfig,
    RequestInput,
    SamplingParams,
    SchedulerConfig,
    SpecConfig,
    load_engine,
)
from tests.builders.trained_head import VOCAB_SIZE, TrainedPair, write_eagle3_pair

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
NUM_SCENARIOS = 200
REQUESTS_PER_SCENARIO = 10  # 2,000 requests in all


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request, the step before which it arrives, and the step before which its client goes away."""

    prompt: tuple[int, ...]
    params: SamplingParams
    step: int
    cancel_step: int | None
    predicts: bool = False  # it brings a prediction of its answer, half right


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What runs, and under which limits. In `spec` the models "HEAD" and "EAGLE3" stand for the trained heads."""

    spec: dict[str, Any]
    num_kv_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client got."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    completion_tokens: int


@pytest.fixture(scope="module")
def alone(pair: TrainedPair) -> LLMEngine:
    """Plain decoding with memory to spare."""
    return make_engine(pair, CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=256), SchedulerConfig(), {})


@pytest.fixture(scope="module")
def eagle3_head(pair: TrainedPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of the same target that drafts one token after the other."""
    other = write_eagle3_pair(tmp_path_factory.mktemp("eagle3"))
    weights = "model.safetensors"
    assert (other.target / weights).read_bytes() == (pair.target / weights).read_bytes()
    return other.head


def make_engine(
    pair: TrainedPair,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    values: dict[str, Any],
    eagle3_head: Path | None = None,
) -> LLMEngine:
    """An engine over the tiny target; `values` are the keys of the speculative configuration."""
    heads = {"HEAD": pair.head, "EAGLE3": eagle3_head}
    spec = SpecConfig.from_mapping(values | ({"model": str(heads[values["model"]])} if "model" in values else {}))
    model = ModelConfig(model=str(pair.target), dtype="float64", max_model_len=MAX_MODEL_LEN)
    return load_engine(EngineConfig(model=model, cache=cache, scheduler=scheduler, spec=spec)).engine


def request(arrival: Arrival, request_id: str, predicted: tuple[int, ...] = ()) -> RequestInput:
    """The engine's view of an arrival."""
    return RequestInput(
        request_id=request_id,
        prompt_token_ids=arrival.prompt,
        params=arrival.params,
        predicted_token_ids=predicted,
    )


def half_right(answer: Answer) -> tuple[int, ...]:
    """A prediction that begins right, is wrong, and is right again with a few tokens missing."""
    tokens = answer.token_ids
    return (*tokens[:4], (tokens[0] + 1) % VOCAB_SIZE, *tokens[7:])


def answer_alone(engine: LLMEngine, arrival: Arrival) -> Answer:
    """The truth: this request by itself, one token a step."""
    return run(engine, (Arrival(prompt=arrival.prompt, params=arrival.params, step=0, cancel_step=None),))[0]


def run(
    engine: LLMEngine, arrivals: tuple[Arrival, ...], predictions: Mapping[int, tuple[int, ...]] | None = None
) -> list[Answer]:
    """Play a scenario to its end, checking the bookkeeping after every step."""
    tokens: list[list[int]] = [[] for _ in arrivals]
    ends: dict[int, Answer] = {}
    step = 0
    while len(ends) < len(arrivals):
        outputs = []
        for index, arrival in enumerate(arrivals):
            if arrival.step == step:
                engine.add_request(request(arrival, str(index), (predictions or {}).get(index, ())))
            if arrival.cancel_step == step:
                outputs.append(engine.abort(str(index)))
        outputs.extend(engine.step())
        engine.check_integrity()
        for output in outputs:
            if output is None:  # it had ended before its client went away
                continue
            index = int(output.request_id)
            tokens[index].extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.error is None
                ends[index] = Answer(
                    token_ids=tuple(tokens[index]),
                    finish_reason=output.finish_reason,
                    completion_tokens=output.usage.completion_tokens,
                )
        step += 1
        assert step < 3000, "a request is starved"
    assert engine.stats().kv_cache_usage == 0.0
    return [ends[index] for index in range(len(arrivals))]


PREFIX = tuple(index * 7 % VOCAB_SIZE for index in range(24))  # shared by many prompts, so that the cache is hit

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.integers(1, 30),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
)


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """One request of a scenario."""
    prefix = PREFIX[: draw(st.sampled_from([0, 0, 7, 16, 24]))]
    tail = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9))
    step = draw(st.integers(0, 25))
    life = draw(st.one_of(st.none(), st.none(), st.integers(0, 20)))
    return Arrival(
        prompt=(*prefix, *tail),
        params=draw(params),
        step=step,
        cancel_step=None if life is None else step + life,
        predicts=draw(st.booleans()),
    )


SPECS: list[dict[str, Any]] = [
    {},
    *({"model": "HEAD", "num_speculative_tokens": count} for count in range(1, 8)),
    {"model": "HEAD"},
    {"model": "HEAD", "num_speculative_tokens": 5, "adaptive_verification": True},
    {"model": "HEAD", "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 3, 2], [4, 99, 0]]},
    {"model": "HEAD", "parallel_drafting_spec": {"num_branches": 3, "depth": 4}},
    {
        "model": "HEAD",
        "parallel_drafting_spec": {"num_branches": 8, "depth": 6},
        "adaptive_verification": False,
    },
    *({"model": "EAGLE3", "num_speculative_tokens": count} for count in (1, 3, 6)),
    {"model": "EAGLE3", "num_speculative_tokens": 4, "adaptive_verification": True},
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    {"method": "suffix", "num_speculative_tokens": 6, "adaptive_verification": True},
]


scenarios = st.builds(
    Scenario,
    spec=st.sampled_from(SPECS),
    num_kv_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 40),
    max_num_batched_tokens=st.sampled_from([8, 11, 16, 64]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    enable_prefix_caching=st.booleans(),
    arrivals=st.lists(arrivals(), min_size=REQUESTS_PER_SCENARIO, max_size=REQUESTS_PER_SCENARIO).map(tuple),
)


@settings(
    max_examples=NUM_SCENARIOS,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scenario=scenarios)
def test_every_request_gets_the_tokens_of_plain_decoding(
    scenario: Scenario, pair: TrainedPair, eagle3_head: Path, alone: LLMEngine
) -> None:
    engine = make_engine(
        pair,
        CacheConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=scenario.num_kv_blocks,
            enable_prefix_caching=scenario.enable_prefix_caching,
        ),
        SchedulerConfig(max_num_seqs=scenario.max_num_seqs, max_num_batched_tokens=scenario.max_num_batched_tokens),
        scenario.spec,
        eagle3_head,
    )
    truths = [answer_alone(alone, arrival) for arrival in scenario.arrivals]
    predictions = {
        index: half_right(truth)
        for index, (arrival, truth) in enumerate(zip(scenario.arrivals, truths, strict=True))
        if arrival.predicts
    }
    answers = run(engine, scenario.arrivals, predictions)
    for answer, truth in zip(answers, truths, strict=True):
        assert answer.completion_tokens == len(answer.token_ids)
        if answer.finish_reason is FinishReason.ABORT:
            assert answer.token_ids == truth.token_ids[: len(answer.token_ids)]
        else:
            assert answer == truth


def test_the_head_is_neither_always_right_nor_always_wrong(pair: TrainedPair) -> None:
    """Otherwise the test above would only see one side of verification."""
    spec = {"model": "HEAD", "num_speculative_tokens": 3}
    engine = make_engine(pair, CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=256), SchedulerConfig(), spec)
    run(
        engine,
        tuple(
            Arrival(
                prompt=(index, index + 1),
                params=SamplingParams(temperature=float(index % 2), seed=index, max_tokens=40),
                step=0,
                cancel_step=None,
            )
            for index in range(12)
        ),
    )
    stats = engine.stats().spec_decode
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert all(count > 0 for count in stats.num_accepted_tokens_per_pos)


def test_a_prediction_saves_steps(pair: TrainedPair, alone: LLMEngine) -> None:
    """Half of a right prediction is worth many steps, with a head that drafts and without one."""
    arrival = Arrival(
        prompt=(3, 1, 4), params=SamplingParams(temperature=1.0, seed=5, max_tokens=40), step=0, cancel_step=None
    )
    truth = answer_alone(alone, arrival)
    engine = make_engine(
        pair, CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=256), SchedulerConfig(), {"method": "suffix"}
    )
    assert run(engine, (arrival,), {0: truth.token_ids}) == [truth]
    assert engine.stats().num_steps < len(truth.token_ids) / 3
