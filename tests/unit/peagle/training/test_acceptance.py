"""Counting rounds, on decodes small enough to write down, and against a decode spelled out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peagle.training.acceptance import AcceptanceCounts, add_counts, walk


def test_a_decode_written_down() -> None:
    # answer: 1 comes with the prompt. Round 1 drafts 2 3 9: two accepted and 4. Round 2 drafts 0: rejected, 5.
    # Round 3 drafts 6 7 8: 6 is the last token of the answer, what follows it is never compared.
    answer = [1, 2, 3, 4, 5, 6]
    drafts = [[2, 3, 9], [0, 0, 0], [0, 0, 0], [0, 6, 6], [6, 7, 8]]
    counts = walk(answer, drafts, num_speculative_tokens=3)
    assert counts == AcceptanceCounts(num_rounds=3, num_tokens=5, num_checked=(3, 1, 1), num_accepted=(2, 1, 0))
    assert counts.acceptance_length == 5 / 3
    assert counts.conditional_rates == (2 / 3, 1.0, 0.0)
    assert counts.cumulative_rates == (2 / 3, 1 / 3, 0.0)
    assert counts.as_json()["num_speculative_tokens"] == 3


def test_perfect_and_useless_drafts_are_the_bounds() -> None:
    answer = [0] * 13
    assert walk(answer, [[0] * 3] * 12, num_speculative_tokens=3).acceptance_length == 4.0
    assert walk(answer, [[1] * 3] * 12, num_speculative_tokens=3).acceptance_length == 1.0


def test_answers_without_a_round() -> None:
    for answer in ([], [5]):
        counts = walk(answer, [], num_speculative_tokens=2)
        assert counts == AcceptanceCounts(num_rounds=0, num_tokens=0, num_checked=(0, 0), num_accepted=(0, 0))
        assert counts.acceptance_length == 0.0
        assert counts.conditional_rates == (0.0, 0.0)


TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=20)


@given(answer=TOKENS, data=st.data(), k=st.integers(1, 4))
def test_the_counts_agree_with_one_another(answer: list[int], data: st.DataObject, k: int) -> None:
    size = len(answer) - 1
    drafts = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=size, max_size=size))
    counts = walk(answer, drafts, num_speculative_tokens=k)
    assert counts.num_tokens == size
    assert list(counts.num_accepted) == sorted(counts.num_accepted, reverse=True)
    assert all(later <= before for before, later in zip(counts.num_accepted, counts.num_checked[1:], strict=False))
    # each round adds its accepted drafts and one token, except that the last one may end without that
    assert size <= sum(counts.num_accepted) + counts.num_rounds <= size + 1
    twice = add_counts([counts, counts], num_speculative_tokens=k)
    assert (twice.num_rounds, twice.num_tokens) == (2 * counts.num_rounds, 2 * size)
    assert twice.conditional_rates == counts.conditional_rates
