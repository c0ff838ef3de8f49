"""Drafters that look tokens up: n-grams, suffixes, and the client's prediction."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from peagle.drafter.lookup import Lookup, TokenHistory, TokenLookup
from peagle.drafter.ngram import NGramLookup
from peagle.drafter.prediction import PredictionLookup
from peagle.drafter.suffix import SuffixLookup

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def history(
    tokens: Sequence[int], *, new: int = 1, prompt: int = 0, predicted: Sequence[int] = (), seq_id: int = 0
) -> TokenHistory:
    cut = max(len(tokens) - new, 0)
    return TokenHistory(
        seq_id=seq_id, committed=tokens[:cut], new=tokens[cut:], num_prompt_tokens=prompt, predicted=predicted
    )


def look(
    lookup: TokenLookup, tokens: Sequence[int], count: int = 4, *, new: int = 1, prompt: int = 0, seq_id: int = 0
) -> tuple[int, ...]:
    return lookup.propose(history(tokens, new=new, prompt=prompt, seq_id=seq_id), max_num_drafts=count).token_ids


def ngram_reference(tokens: Sequence[int], *, shortest: int, longest: int, count: int) -> tuple[int, ...]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[end - length : end]) == list(tokens[len(tokens) - length :]):
                continued = list(tokens)
                while len(continued) < len(tokens) + count:
                    continued.append(continued[end + len(continued) - len(tokens)])
                return tuple(continued[len(tokens) :])
    return ()


@given(tokens=TOKENS, shortest=st.integers(1, 3), more=st.integers(0, 3), steps=st.lists(st.integers(1, 5)))
def test_ngrams_equal_a_search_from_the_end(tokens: list[int], shortest: int, more: int, steps: list[int]) -> None:
    lookup = NGramLookup(shortest=shortest, longest=shortest + more)
    lengths = sorted({min(sum(steps[: n + 1]), len(tokens)) for n in range(len(steps))} | {len(tokens)})
    for length in lengths:  # the index grows from step to step
        expected = ngram_reference(tokens[:length], shortest=shortest, longest=shortest + more, count=4)
        assert look(lookup, tokens[:length]) == expected


def test_ngram_drafts_continue_a_repetition_beyond_its_end() -> None:
    assert look(NGramLookup(), [1, 2, 3, 1, 2, 3, 1, 2], 7) == (3, 1, 2, 3, 1, 2, 3)


def test_longer_matches_are_surer() -> None:
    short = NGramLookup(shortest=1).propose(history([5, 1, 9, 1]), max_num_drafts=1)
    long = NGramLookup(shortest=1).propose(history([5, 6, 1, 9, 5, 6, 1]), max_num_drafts=1)
    assert short.token_ids == long.token_ids == (9,)
    assert short.confidences < long.confidences


def test_tokens_that_were_taken_back_are_forgotten() -> None:
    lookup = NGramLookup()
    look(lookup, [1, 2, 3, 1, 2, 9, 1, 2])
    assert look(lookup, [1, 2, 3, 1, 2]) == (3, 1, 2, 3)


def test_forgetting_a_sequence_is_only_a_loss_of_time() -> None:
    for lookup in (NGramLookup(), SuffixLookup(), PredictionLookup()):
        before = look(lookup, [1, 2, 3, 1, 2], prompt=5)
        lookup.forget(0)
        lookup.forget(77)
        assert look(lookup, [1, 2, 3, 1, 2], prompt=5) == before


def test_suffix_prefers_what_followed_most_often() -> None:
    tokens = [1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 8, 0, 1, 2]
    assert look(SuffixLookup(), tokens, 2, prompt=len(tokens)) == (8, 0)


def test_suffix_ends_a_run_that_is_not_likely_enough() -> None:
    tokens = [1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2]
    found = SuffixLookup(least_confidence=0.3).propose(history(tokens, prompt=len(tokens)), max_num_drafts=8)
    assert found == Lookup()


def test_answers_feed_the_memory_of_others_and_prompts_do_not() -> None:
    answer, secret = [1, 2, 3, 4, 5], [6, 7, 8, 9]
    lookup = SuffixLookup()
    look(lookup, [*secret, *answer], prompt=len(secret), new=len(answer))
    assert look(lookup, [2, 3], 2, seq_id=1, prompt=2) == (4, 5)
    assert look(lookup, [6, 7], 2, seq_id=2, prompt=2) == ()


def test_the_memory_of_answers_is_limited() -> None:
    lookup = SuffixLookup(max_recent_tokens=20)
    for seq_id in range(40):
        answer = list(range(seq_id * 10, seq_id * 10 + 10))
        look(lookup, [0, *answer], prompt=1, seq_id=seq_id, new=10)
        lookup.forget(seq_id)
    assert look(lookup, [391, 392], 2, seq_id=99, prompt=2) == (393, 394)
    assert look(lookup, [1, 2], 2, seq_id=100, prompt=2) == ()


@given(tokens=TOKENS)
def test_suffix_counts_do_not_depend_on_the_steps(tokens: list[int]) -> None:
    one_by_one, at_once = SuffixLookup(), SuffixLookup()
    for length in range(1, len(tokens) + 1):
        stepwise = look(one_by_one, tokens[:length], prompt=len(tokens))
    assert stepwise == look(at_once, tokens, prompt=len(tokens))


PREDICTED = list(range(100, 130))


def follow(answer: Sequence[int], *, predicted: Sequence[int] = PREDICTED, step: int = 1) -> tuple[int, ...]:
    lookup, prompt = PredictionLookup(), [1, 2, 3]
    found: tuple[int, ...] = ()
    for length in [*range(step, len(answer), step), len(answer)]:
        tokens = [*prompt, *answer[:length]]
        found = lookup.propose(
            history(tokens, prompt=3, predicted=predicted, new=min(step, length)), max_num_drafts=4
        ).token_ids
    return found


def test_a_prediction_is_followed_from_its_beginning() -> None:
    assert follow([100]) == (101, 102, 103, 104)
    assert follow(PREDICTED[:7], step=3) == (107, 108, 109, 110)
    assert follow(PREDICTED[:28]) == (128, 129)
    assert follow(PREDICTED) == ()


def test_after_a_miss_the_answer_is_found_again() -> None:
    assert follow([100, 101, 7, 8, 110]) == ()
    assert follow([100, 101, 7, 8, 110, 111]) == (112, 113, 114, 115)
    assert follow([100, 101, 7, 8, 110, 111], step=6) == (112, 113, 114, 115)


def test_the_longest_match_wins_then_the_nearest_behind_the_miss() -> None:
    repeated = [1, 2, 50, 9, 1, 2, 60, 8, 1, 2, 70]
    assert follow([1, 2, 50, 99, 1, 2], predicted=repeated)[0] == 60
    assert follow([1, 2, 50, 99, 8, 1, 2], predicted=repeated)[0] == 70


def test_without_a_prediction_there_is_nothing() -> None:
    assert follow([100], predicted=()) == ()


@given(answer=TOKENS, predicted=TOKENS, step=st.integers(1, 4))
def test_drafts_are_always_a_piece_of_the_prediction(answer: list[int], predicted: list[int], step: int) -> None:
    found = list(follow(answer, predicted=predicted, step=step))
    pieces = [predicted[start : start + len(found)] for start in range(len(predicted) + 1)]
    assert found in pieces
