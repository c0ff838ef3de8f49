"""The configuration groups: ranges, and errors that say what to change."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    ModelConfig,
    SchedulerConfig,
    SpecConfig,
    parse_bytes,
    unknown_key_message,
)
from peagle.errors import ConfigError


def test_the_defaults_are_valid_and_decode_plainly() -> None:
    assert EngineConfig().spec.num_speculative_tokens == 0


def test_groups_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ModelConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("group", [ModelConfig, CacheConfig, SchedulerConfig, SpecConfig, GraphConfig])
def test_every_field_has_a_help_text(group: type) -> None:
    assert all(field.metadata.get("help") for field in fields(group))


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (ModelConfig, {"model": ""}, "model must not be empty"),
        (ModelConfig, {"dtype": "float8"}, "dtype must be one of auto, float64"),
        (ModelConfig, {"max_model_len": 1}, "max_model_len must be at least 2, got 1"),
        (CacheConfig, {"num_kv_blocks": 5, "kv_cache_memory": "1GiB"}, "not both"),
        (CacheConfig, {"kv_cache_memory": "much"}, "not a size: 'much'"),
        (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        (SchedulerConfig, {"max_num_seqs": 8, "max_num_batched_tokens": 7}, "must be at least max_num_seqs"),
        (SpecConfig, {"num_speculative_tokens": 33, "model": "head"}, "between 0 and 32, got 33"),
        (SpecConfig, {"num_speculative_tokens": 4}, "without a draft head"),
        (SpecConfig, {"model": "head"}, "without num_speculative_tokens"),
        (GraphConfig, {"graph_batch_sizes": (4, 2)}, "increasing"),
        (GraphConfig, {"graph_batch_sizes": ()}, "increasing"),
    ],
)
def test_what_cannot_work_is_refused(group: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        group(**values)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("123", 123), ("1k", 1000), ("2GiB", 2 * 2**30), (" 1.5 MiB ", 3 * 2**19), ("3gb", 3 * 10**9), (7, 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@given(st.text())
def test_a_size_is_read_or_refused_in_words(text: str) -> None:
    try:
        assert parse_bytes(text) >= 0
    except ConfigError as error:
        assert "not a size" in str(error)  # noqa: PT017 (both outcomes are right)


def test_an_unknown_key_names_the_nearest_one() -> None:
    known = ["max_num_seqs", "seed"]
    assert unknown_key_message("max_num_seq", known, "x.yaml").endswith("did you mean 'max_num_seqs'?")
    assert unknown_key_message("zzz", known, "x.yaml").endswith("known keys: max_num_seqs, seed")


def test_speculation_from_a_mapping() -> None:
    spec = SpecConfig.from_mapping(
        {"model": "head", "num_speculative_tokens": 4, "method": "eagle3", "parallel_drafting": True}
    )
    assert spec == SpecConfig(model="head", num_speculative_tokens=4, method="eagle3", parallel_drafting=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_speculative_token": 4}, "did you mean 'num_speculative_tokens'"),
        ({"model": "head", "num_speculative_tokens": True}, "num_speculative_tokens must be int, got True"),
        ({"model": "head", "num_speculative_tokens": "4"}, "num_speculative_tokens must be int, got '4'"),
        ({"model": "head", "num_speculative_tokens": 4, "method": "medusa"}, "must be eagle3 or peagle"),
        ({"model": "head", "num_speculative_tokens": 4, "method": "eagle3"}, "set parallel_drafting to true"),
        ({"method": "peagle"}, "without `model`"),
    ],
)
def test_speculation_refuses_what_it_does_not_know(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpecConfig.from_mapping(values)


def test_the_token_budget_follows_the_device_unless_it_is_given() -> None:
    config = SchedulerConfig()
    assert config.resolve(is_on_cpu=True).token_budget == 128
    assert config.resolve(is_on_cpu=False).token_budget == 2048
    assert SchedulerConfig(max_num_seqs=100).resolve(is_on_cpu=True).token_budget == 400
    assert SchedulerConfig(max_num_batched_tokens=77).resolve(is_on_cpu=True).token_budget == 77
