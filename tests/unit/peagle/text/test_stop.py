from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.text.stop import StopMatcher, StopResult, match_whole_text

# Few letters, so that strings overlap themselves and one another all the time.
TEXTS = st.text(alphabet="ab🙂", max_size=40)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=6), max_size=4).map(tuple)


def run(pieces: list[str], stop: tuple[str, ...]) -> StopResult:
    matcher = StopMatcher(stop)
    results = [matcher.push(piece) for piece in pieces]
    results.append(matcher.flush())
    return StopResult(text_to_emit="".join(r.text_to_emit for r in results), matched=results[-1].matched)


@given(pieces=st.lists(st.text(alphabet="ab🙂", max_size=7), max_size=12), stop=STOPS)
def test_after_each_piece_exactly_the_reference_is_out(pieces: list[str], stop: tuple[str, ...]) -> None:
    matcher, seen, emitted = StopMatcher(stop), "", ""
    for piece in pieces:
        result = matcher.push(piece)
        seen, emitted = seen + piece, emitted + result.text_to_emit
        assert StopResult(text_to_emit=emitted, matched=result.matched) == match_whole_text(seen, stop)


@given(text=TEXTS, stop=STOPS, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_how_the_text_is_split_changes_nothing(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert run(pieces, stop) == run([text], stop) == run(list(text), stop)


@given(text=TEXTS, stop=STOPS)
def test_nothing_is_lost_and_no_stop_string_gets_out(text: str, stop: tuple[str, ...]) -> None:
    result = run(list(text), stop)
    assert not any(pattern in result.text_to_emit for pattern in stop)
    if result.matched is None:
        assert result.text_to_emit == text
    else:
        assert text.startswith(result.text_to_emit + result.matched)


@pytest.mark.parametrize(
    ("text", "stop", "emitted", "matched"),
    [
        ("hello world", (), "hello world", None),
        ("hello world", ("wor",), "hello ", "wor"),
        ("hello wo", ("wor",), "hello wo", None),  # held back, then given out at the end
        ("xabcx", ("abc", "b"), "xa", "b"),  # ends first
        ("xab", ("b", "ab"), "x", "ab"),  # same end: the longest, whatever the order
        ("xab", ("ab", "b"), "x", "ab"),
        ("aabaac", ("aabaac",), "", "aabaac"),
        ("aabaabaac", ("aabaac",), "aab", "aabaac"),  # begins again inside a failed beginning
        ("one.\n\ntwo", ("\n\n", "two"), "one.", "\n\n"),
        ("stop and stop", ("stop",), "", "stop"),  # nothing after the first match counts
    ],
)
def test_examples(text: str, stop: tuple[str, ...], emitted: str, matched: str | None) -> None:
    assert run([text], stop) == run(list(text), stop) == StopResult(text_to_emit=emitted, matched=matched)


def test_only_what_could_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(("<end>",))
    assert matcher.push("a < b <e").text_to_emit == "a < b "
    assert matcher.push("nough").text_to_emit == "<enough"
    assert matcher.push("<end").text_to_emit == ""
    assert matcher.flush().text_to_emit == "<end"
    assert matcher.flush().text_to_emit == ""


def test_after_a_match_everything_is_swallowed() -> None:
    matcher = StopMatcher(("b",))
    assert matcher.push("abc") == StopResult(text_to_emit="a", matched="b")
    assert matcher.push("abc") == StopResult(text_to_emit="", matched="b")
    assert matcher.flush() == StopResult(text_to_emit="", matched="b")


def test_a_long_stop_string_costs_linear_time() -> None:
    stop = ("a" * 20_000 + "b",)
    text = "a" * 40_000  # a matcher that compares from scratch at each character would never come back
    assert run([text], stop).text_to_emit == text
    assert run([text, "b"], stop) == StopResult(text_to_emit="a" * 20_000, matched=stop[0])
