from __future__ import annotations

from typing import Any

import pytest

from peagle.errors import ConfigError
from peagle.spec_config import BatchSizeRange, SpecConfig, TreeSpec

HEAD = {"model": "head"}


def test_the_json_of_a_published_model_card() -> None:
    card = {"method": "eagle3", "model": "amazon/x", "num_speculative_tokens": 7, "parallel_drafting": True}
    spec = SpecConfig.from_mapping(card)
    assert spec == SpecConfig(model="amazon/x", num_speculative_tokens=7, method="eagle3", parallel_drafting=True)
    assert not spec.is_adaptive


EVERY_KEY: list[dict[str, Any]] = [
    {},
    {**HEAD, "adaptive_verification": True, "num_speculative_tokens": 5},
    {**HEAD, "draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
    {**HEAD, "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 6, 3], [7, 999, 0]]},
    {**HEAD, "parallel_drafting_spec": {"num_branches": 4, "depth": 5}},
    {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 5},
    {"method": "suffix"},
]


@pytest.mark.parametrize("values", EVERY_KEY)
def test_what_is_read_can_be_written_and_read_again(values: dict[str, Any]) -> None:
    spec = SpecConfig.from_mapping(values)
    assert spec.to_mapping() == values
    assert SpecConfig.from_mapping(spec.to_mapping()) == spec


def test_null_is_absence() -> None:
    assert SpecConfig.from_mapping({"model": "head", "method": None, "parallel_drafting_spec": None}) == SpecConfig(
        model="head"
    )


def test_tables_and_trees_become_what_they_are() -> None:
    spec = SpecConfig.from_mapping({**HEAD, "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 32, 1]]})
    assert spec.num_speculative_tokens_per_batch_size == (
        BatchSizeRange(first=1, last=8, num_speculative_tokens=4),
        BatchSizeRange(first=9, last=32, num_speculative_tokens=1),
    )
    assert TreeSpec(num_branches=3, depth=4).num_nodes == 12


@pytest.mark.parametrize(
    ("values", "is_adaptive"),
    [
        (HEAD, True),
        ({**HEAD, "num_speculative_tokens": 5}, False),
        ({**HEAD, "num_speculative_tokens": 5, "adaptive_verification": True}, True),
        ({**HEAD, "adaptive_verification": False}, False),
        ({**HEAD, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]}, False),
    ],
)
def test_the_load_decides_unless_somebody_has(values: dict[str, Any], is_adaptive: bool) -> None:
    assert SpecConfig.from_mapping(values).is_adaptive is is_adaptive


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_speculative_token": 4}, "did you mean 'num_speculative_tokens'"),
        ({**HEAD, "num_speculative_tokens": True}, "num_speculative_tokens must be an integer, got True"),
        ({**HEAD, "num_speculative_tokens": "4"}, "num_speculative_tokens must be an integer, got '4'"),
        ({**HEAD, "num_speculative_tokens": 33}, "between 0 and 32, got 33"),
        ({**HEAD, "num_speculative_tokens": 0}, "leave `model` out"),
        ({"num_speculative_tokens": 4}, "without a draft head"),
        ({**HEAD, "method": "medusa"}, "must be one of eagle, eagle3, peagle, ngram, suffix; got 'medusa'"),
        ({**HEAD, "method": "peagle", "parallel_drafting": False}, "drafts in parallel"),
        ({"method": "peagle"}, "sets method without `model`"),
        ({"draft_sample_method": "probabilistic"}, "without `model`"),
        ({"adaptive_verification": True}, "without `model`"),
        (
            {**HEAD, "num_speculative_tokens": 5, "parallel_drafting_spec": {"num_branches": 2, "depth": 2}},
            "leave num_speculative_tokens out",
        ),
        ({**HEAD, "draft_sample_method": "warm"}, "greedy, probabilistic; got 'warm'"),
        ({**HEAD, "rejection_sample_method": "block"}, "draft_sample_method probabilistic"),
        ({**HEAD, "prompt_lookup_min": 2}, "belong to method ngram"),
        ({"method": "suffix", "prompt_lookup_min": 2}, "belong to method ngram"),
        ({"method": "ngram", "model": "head"}, "needs no draft head"),
        ({"method": "ngram", "draft_sample_method": "probabilistic"}, "looked up, not sampled"),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "got 3 to 2"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "a range from 1 on"),
        ({**HEAD, "num_speculative_tokens_per_batch_size": []}, "must not be empty"),
        ({**HEAD, "num_speculative_tokens_per_batch_size": [[1, 2]]}, r"a list of \[first, last, K\]"),
        ({**HEAD, "num_speculative_tokens_per_batch_size": [[2, 4, 3]]}, "must begin at 1"),
        ({**HEAD, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [6, 8, 1]]}, "must begin at 5"),
        ({**HEAD, "num_speculative_tokens_per_batch_size": [[1, 4, 40]]}, "between 0 and 32"),
        (
            {**HEAD, "num_speculative_tokens_per_batch_size": [[1, 4, 3]], "adaptive_verification": True},
            "not both",
        ),
        ({**HEAD, "parallel_drafting_spec": {"branches": 4, "depth": 5}}, "unknown key 'branches'"),
        ({**HEAD, "parallel_drafting_spec": {"depth": 5}}, "with whole numbers"),
        ({**HEAD, "parallel_drafting_spec": {"num_branches": 0, "depth": 5}}, "num_branches of at least 1"),
        ({**HEAD, "parallel_drafting_spec": {"num_branches": 33, "depth": 2}}, "66 drafts"),
        (
            {**HEAD, "parallel_drafting": False, "parallel_drafting_spec": {"num_branches": 2, "depth": 2}},
            "drafts in parallel",
        ),
        (
            {**HEAD, "draft_sample_method": "probabilistic", "parallel_drafting_spec": {"num_branches": 2, "depth": 2}},
            "must be greedy",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpecConfig.from_mapping(values)
