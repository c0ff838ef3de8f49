"""Trees of drafts are as invisible as chains: in float64, every request gets the tokens of plain decoding.

Random scenarios at the engine's door: trees of many shapes and heads that are right now and then, greedy and seeded
requests, arrivals and cancellations, prompts in chunks and from the prefix cache, pools too small for all (so sequences
are preempted with their trees), and token budgets that cut trees to their first nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle import FinishReason, LLMEngine
from peagle.spec_config import SpecConfig, TreeSpec
from tests.builders.engine import Answer, Arrival, make_engine, make_request, play
from tests.builders.trained_head import VOCAB_SIZE, TrainedPair

NUM_SCENARIOS = 40
REQUESTS_PER_SCENARIO = 8
PREFIX = tuple(index * 7 % VOCAB_SIZE for index in range(24))  # shared by many prompts, so that the cache is hit
TREES = ((1, 4), (2, 2), (3, 4), (8, 4), (4, 1), (10, 6))  # branches and depth; a chain, and wider than 33 rows


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What runs, and under which limits."""

    tree: TreeSpec
    limits: dict[str, Any]
    arrivals: tuple[Arrival, ...]


@pytest.fixture(scope="module")
def alone(pair: TrainedPair) -> LLMEngine:
    """Plain decoding with memory to spare."""
    return make_engine(pair.target)


def tree_engine(head: Path, target: Path, tree: TreeSpec, **limits: Any) -> LLMEngine:
    spec = SpecConfig(model=str(head), parallel_drafting_spec=tree, adaptive_verification=False)
    return make_engine(target, spec=spec, **limits)


@st.composite
def arrivals(draw: st.DrawFn, name: str) -> Arrival:
    """One request of a scenario."""
    prefix = PREFIX[: draw(st.sampled_from([0, 0, 7, 16, 24]))]
    tail = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9))
    step = draw(st.integers(0, 15))
    life = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)))
    request = make_request(
        name,
        (*prefix, *tail),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        top_k=draw(st.sampled_from([0, 0, 3])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        max_tokens=draw(st.integers(1, 30)),
        stop_token_ids=draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1)),
    )
    return Arrival(request=request, step=step, abort_step=None if life is None else step + life)


limits = st.fixed_dictionaries(
    {
        "num_kv_blocks": st.integers(16, 40),
        "max_num_batched_tokens": st.sampled_from([8, 11, 24, 200]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "enable_prefix_caching": st.booleans(),
    }
)
scenarios = st.builds(
    Scenario,
    tree=st.sampled_from(TREES).map(lambda size: TreeSpec(num_branches=size[0], depth=size[1])),
    limits=limits,
    arrivals=st.tuples(*(arrivals(str(index)) for index in range(REQUESTS_PER_SCENARIO))),
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
    engine = tree_engine(pair.head, pair.target, scenario.tree, **scenario.limits)
    answers = play(engine, scenario.arrivals)
    for arrival in scenario.arrivals:
        answer = answers[arrival.request.request_id]
        truth = answer_alone(alone, arrival)
        if answer.finish_reason is FinishReason.ABORT:
            assert answer.token_ids == truth.token_ids[: len(answer.token_ids)]
        else:
            assert (answer.token_ids, answer.finish_reason) == (truth.token_ids, truth.finish_reason)


def answer_alone(engine: LLMEngine, arrival: Arrival) -> Answer:
    """The truth: this request by itself, one token a step."""
    return play(engine, [Arrival(request=arrival.request)])[arrival.request.request_id]


def num_steps(engine: LLMEngine) -> int:
    """Steps that greedy and sampled answers take, one by one."""
    for index in range(16):
        request = make_request(str(index), (index, index + 1), temperature=float(index % 2), seed=index, max_tokens=40)
        play(engine, [Arrival(request=request)])
    return engine.stats().num_steps


def test_a_tree_saves_steps(pair: TrainedPair) -> None:
    """A chain of the same depth is part of what the tree offers, so more is accepted."""
    spec = SpecConfig(model=str(pair.head), num_speculative_tokens=4)
    chain = num_steps(make_engine(pair.target, spec=spec))
    tree = num_steps(tree_engine(pair.head, pair.target, TreeSpec(num_branches=4, depth=4)))
    assert tree < 0.95 * chain
