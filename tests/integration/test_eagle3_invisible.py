"""The promise with a head that drafts one token after the other: speculation is invisible, except in speed.

A tiny target and an EAGLE-3 head trained on it, in float64, with a pool too small for all (so that requests are
preempted and start again), a token budget that cuts prompts into chunks, and prompts that share prefixes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peagle.engine.engine import LLMEngine
from peagle.outputs import RequestInput
from peagle.spec_config import SpecConfig
from tests.builders.engine import ask, make_engine, make_request, write_checkpoint
from tests.builders.published_heads import last_hidden_eagle3, merging_eagle
from tests.builders.tokenizer import build_tokenizer_directory
from tests.builders.trained_head import VOCAB_SIZE, TrainedPair, write_eagle3_pair

PREFIX = [index * 7 % VOCAB_SIZE for index in range(16)]
NUM_REQUESTS = 10
TIGHT: dict[str, Any] = {"num_kv_blocks": 20, "max_num_batched_tokens": 24, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TrainedPair:
    pair = write_eagle3_pair(tmp_path_factory.mktemp("eagle3"))
    build_tokenizer_directory(pair.target)
    return pair


def requests(temperatures: tuple[float, ...] = (0.0, 1.0)) -> list[RequestInput]:
    """Greedy and seeded ones, some with the same beginning."""
    return [
        make_request(
            str(index),
            [*PREFIX[: (index % 3) * 8], index, index + 1],
            temperature=temperatures[index % len(temperatures)],
            seed=index,
            max_tokens=30,
        )
        for index in range(NUM_REQUESTS)
    ]


def answers(engine: LLMEngine, asked: list[RequestInput]) -> dict[str, list[int]]:
    found = {name: answer.token_ids for name, answer in ask(engine, *asked).items()}
    engine.check_integrity()
    return found


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 6])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_answers_are_those_of_plain_decoding(
    pair: TrainedPair, num_speculative_tokens: int, enable_prefix_caching: bool
) -> None:
    spec = SpecConfig(model=str(pair.head), num_speculative_tokens=num_speculative_tokens)
    engine = make_engine(pair.target, spec=spec, enable_prefix_caching=enable_prefix_caching, **TIGHT)
    assert answers(engine, requests()) == answers(make_engine(pair.target), requests())
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert 0.05 < stats.spec_decode.num_accepted_tokens / stats.spec_decode.num_draft_tokens < 0.95
    if enable_prefix_caching:
        repeated = answers(engine, requests())
        assert repeated == answers(make_engine(pair.target), requests())
        assert engine.stats().prefix_cache.hits > 0


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_speculative_tokens": 5, "adaptive_verification": True},
        {"method": "eagle3", "parallel_drafting": False},
    ],
    ids=str,
)
def test_the_load_may_decide_how_much_is_drafted(pair: TrainedPair, values: dict[str, Any]) -> None:
    spec = SpecConfig.from_mapping({"model": str(pair.head)} | values)
    assert answers(make_engine(pair.target, spec=spec, **TIGHT), requests()) == answers(
        make_engine(pair.target), requests()
    )


def test_later_drafts_are_accepted_too(pair: TrainedPair) -> None:
    """A cliff behind the first draft would mean that the head is not fed what it made."""
    engine = make_engine(pair.target, spec=SpecConfig(model=str(pair.head), num_speculative_tokens=3))
    ask(engine, *requests((0.0,)))
    first, second, _ = engine.stats().spec_decode.num_accepted_tokens_per_pos
    assert second > first * 0.2


def test_drawn_drafts_leave_greedy_answers_alone(pair: TrainedPair) -> None:
    spec = SpecConfig(model=str(pair.head), num_speculative_tokens=3, draft_sample_method="probabilistic")
    drawn = answers(make_engine(pair.target, spec=spec, **TIGHT), requests())
    plain = answers(make_engine(pair.target), requests())
    assert len(drawn) == NUM_REQUESTS
    for index in range(0, NUM_REQUESTS, 2):
        assert drawn[str(index)] == plain[str(index)]


@pytest.mark.parametrize("make", [last_hidden_eagle3, merging_eagle])
def test_heads_on_the_last_hidden_state_serve(checkpoint: Path, tmp_path: Path, make: Any) -> None:
    """Untrained, they are never right, and still nothing changes."""
    spec = SpecConfig(model=str(make().write(tmp_path)), num_speculative_tokens=2)
    engine = make_engine(checkpoint, spec=spec, **TIGHT)
    assert answers(engine, requests()) == answers(make_engine(checkpoint), requests())
    assert engine.stats().spec_decode.num_drafts > 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "tiny")
