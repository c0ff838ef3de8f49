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
    parse_bytes,
)
from peagle.config_field import unknown_key_message
from peagle.errors import ConfigError
from peagle.spec_config import SpecConfig


def test_the_defaults_are_valid_and_decode_plainly() -> None:
    assert EngineConfig().spec.model is None


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


def test_the_token_budget_follows_the_device_unless_it_is_given() -> None:
    config = SchedulerConfig()
    assert config.resolve(is_on_cpu=True).token_budget == 128
    assert config.resolve(is_on_cpu=False).token_budget == 2048
    assert SchedulerConfig(max_num_seqs=100).resolve(is_on_cpu=True).token_budget == 400
    assert SchedulerConfig(max_num_batched_tokens=77).resolve(is_on_cpu=True).token_budget == 77
