"""Draft vocabularies: what is chosen, what is covered, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import ConfigError
from peagle.training.vocabulary import build_draft_vocabulary, count_tokens


def test_the_frequent_tokens_and_the_end_tokens_are_chosen() -> None:
    counts = count_tokens([[5, 5, 5, 1], [1, 3, 7]], vocab_size=8)
    vocabulary = build_draft_vocabulary(counts, 3, always={6})
    assert vocabulary.target_ids.tolist() == [1, 5, 6]
    assert vocabulary.offsets.tolist() == [1, 4, 4]
    assert vocabulary.is_drafted.nonzero().flatten().tolist() == [1, 5, 6]
    assert (vocabulary.num_covered, vocabulary.num_tokens) == (5, 7)
    assert vocabulary.summary() == "draft vocabulary: 3 of 8 tokens, which cover 71.43% of 7 counted ones"


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any),
    size=st.integers(1, 40),
    always=st.sets(st.integers(0, 39), max_size=5),
)
def test_no_other_choice_covers_more(counts: list[int], size: int, always: set[int]) -> None:
    always = {token_id for token_id in always if token_id < len(counts)}
    size = max(min(size, len(counts)), len(always), 1)
    vocabulary = build_draft_vocabulary(torch.tensor(counts), size, always=always)
    chosen = vocabulary.target_ids.tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert always <= set(chosen)
    optional = sorted((counts[i] for i in range(len(counts)) if i not in always), reverse=True)
    assert vocabulary.num_covered == sum(counts[i] for i in always) + sum(optional[: size - len(always)])
    assert vocabulary.is_drafted.nonzero().flatten().tolist() == chosen


def test_the_whole_vocabulary_is_the_identity() -> None:
    vocabulary = build_draft_vocabulary(torch.tensor([0, 2, 1]), 3, always={0})
    assert vocabulary.offsets.tolist() == [0, 0, 0]
    assert vocabulary.coverage == 1.0


@pytest.mark.parametrize(
    ("counts", "size", "always", "message"),
    [
        ([1, 1], 3, set(), "larger than the target's, which has 2 tokens"),
        ([1, 1, 1], 1, {0, 1}, "no room for the 2 tokens that end an answer"),
        ([1, 1], 0, set(), "no room"),
        ([0, 0], 1, set(), "no tokens were counted"),
    ],
)
def test_impossible_vocabularies_are_refused(counts: list[int], size: int, always: set[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_draft_vocabulary(torch.tensor(counts), size, always=always)


@pytest.mark.parametrize("token_id", [-1, 4])
def test_tokens_of_another_tokenizer_are_refused(token_id: int) -> None:
    with pytest.raises(ConfigError, match="another tokenizer"):
        count_tokens([[0, 1], [token_id]], vocab_size=4)


def test_empty_sequences_count_nothing() -> None:
    assert count_tokens([[], [2]], vocab_size=3).tolist() == [0, 0, 1]
