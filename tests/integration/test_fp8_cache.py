"""Keys and values in eight bits: answers are a little different, and the same with drafts as without."""

from __future__ import annotations

from typing import Any

import pytest

from peagle import SpecConfig
from tests.builders.engine import ask, make_engine, make_request
from tests.builders.trained_head import TrainedPair


@pytest.mark.parametrize(
    "spec", [{"num_speculative_tokens": 5}, {"parallel_drafting_spec": {"num_branches": 2, "depth": 3}}]
)
def test_speculation_does_not_show(pair: TrainedPair, spec: dict[str, Any]) -> None:
    requests = [
        make_request(str(seed), [1 + seed, 2, 3], max_tokens=30, temperature=0.7 * (seed % 2), seed=seed)
        for seed in range(6)
    ]
    values: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "fp8", "num_kv_blocks": 256}
    drafting = SpecConfig.from_mapping({"model": str(pair.head), "adaptive_verification": False} | spec)
    plain = ask(make_engine(pair.target, **values), *requests)
    drafted = ask(make_engine(pair.target, spec=drafting, **values), *requests)
    assert {name: answer.token_ids for name, answer in plain.items()} == {
        name: answer.token_ids for name, answer in drafted.items()
    }
    exact = ask(make_engine(pair.target, **values | {"kv_cache_dtype": "auto"}), *requests)
    assert any(exact[name].token_ids != plain[name].token_ids for name in exact), "eight bits do round"
