"""The promise: speculation is invisible, except in speed.

A tiny target and a head trained on it, in float64. Random scenarios (arrivals, cancellations, pools too small for all,
token budgets, K, sampling parameters) run with speculation, and every request must give token for token what it gives
alone, without speculation and with memory to spare. After each scenario the bookkeeping is checked and no block is in
use.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from tests.builders.tokenizer import build_tokenizer_directory
from tests.builders.trained_head import VOCAB_SIZE, TrainedPair, write_trained_pair

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


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What runs, and under which limits."""

    num_speculative_tokens: int
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
def pair(tmp_path_factory: pytest.TempPathFactory) -> TrainedPair:
    """The two checkpoints, with a tokenizer beside the target."""
    pair = write_trained_pair(tmp_path_factory.mktemp("pair"))
    build_tokenizer_directory(pair.target)
    return pair


@pytest.fixture(scope="module")
def alone(pair: TrainedPair) -> LLMEngine:
    """Plain decoding with memory to spare."""
    return make_engine(pair, CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=256), SchedulerConfig(), None)


def make_engine(
    pair: TrainedPair, cache: CacheConfig, scheduler: SchedulerConfig, num_speculative_tokens: int | None
) -> LLMEngine:
    """An engine over the tiny target, with the trained head unless K is None."""
    spec = SpecConfig()
    if num_speculative_tokens:
        spec = SpecConfig(model=str(pair.head), num_speculative_tokens=num_speculative_tokens)
    model = ModelConfig(model=str(pair.target), dtype="float64", max_model_len=MAX_MODEL_LEN)
    return load_engine(EngineConfig(model=model, cache=cache, scheduler=scheduler, spec=spec)).engine


def request(arrival: Arrival, request_id: str) -> RequestInput:
    """The engine's view of an arrival."""
    return RequestInput(request_id=request_id, prompt_token_ids=arrival.prompt, params=arrival.params)


def answer_alone(engine: LLMEngine, arrival: Arrival) -> Answer:
    """The truth: this request by itself, one token a step."""
    return run(engine, (Arrival(prompt=arrival.prompt, params=arrival.params, step=0, cancel_step=None),))[0]


def run(engine: LLMEngine, arrivals: tuple[Arrival, ...]) -> list[Answer]:
    """Play a scenario to its end, checking the bookkeeping after every step."""
    tokens: list[list[int]] = [[] for _ in arrivals]
    ends: dict[int, Answer] = {}
    step = 0
    while len(ends) < len(arrivals):
        outputs = []
        for index, arrival in enumerate(arrivals):
            if arrival.step == step:
                engine.add_request(request(arrival, str(index)))
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
    )


scenarios = st.builds(
    Scenario,
    num_speculative_tokens=st.integers(0, 7),
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
    scenario: Scenario, pair: TrainedPair, alone: LLMEngine
) -> None:
    engine = make_engine(
        pair,
        CacheConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=scenario.num_kv_blocks,
            enable_prefix_caching=scenario.enable_prefix_caching,
        ),
        SchedulerConfig(max_num_seqs=scenario.max_num_seqs, max_num_batched_tokens=scenario.max_num_batched_tokens),
        scenario.num_speculative_tokens,
    )
    for arrival, answer in zip(scenario.arrivals, run(engine, scenario.arrivals), strict=True):
        truth = answer_alone(alone, arrival)
        assert answer.completion_tokens == len(answer.token_ids)
        if answer.finish_reason is FinishReason.ABORT:
            assert answer.token_ids == truth.token_ids[: len(answer.token_ids)]
        else:
            assert answer == truth


def test_the_head_is_neither_always_right_nor_always_wrong(pair: TrainedPair) -> None:
    """Otherwise the test above would only see one side of verification."""
    engine = make_engine(pair, CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=256), SchedulerConfig(), 3)
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
    spec = engine.stats().spec_decode
    assert 0.1 < spec.num_accepted_tokens / spec.num_draft_tokens < 0.95
    assert sum(spec.num_accepted_tokens_per_pos) == spec.num_accepted_tokens
    assert all(count > 0 for count in spec.num_accepted_tokens_per_pos)
