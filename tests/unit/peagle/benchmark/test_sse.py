"""Server-sent events: the same events whatever way the bytes are cut."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.benchmark.sse import SseParser

STREAM = (
    'data: {"a": "wörld 🙂"}\n\n: ping\n\ndata:no space\ndata:  two spaces\n\nevent: x\nid: 1\ndata\n\ndata: [DONE]\n\n'
)
EVENTS = ['{"a": "wörld 🙂"}', "no space\n two spaces", "", "[DONE]"]


def parse_in(chunks: list[bytes]) -> list[bytes]:
    parser = SseParser()
    return [payload for chunk in chunks for payload in parser.feed(chunk)]


def parse_whole(stream: bytes) -> list[bytes]:
    """The slow, obvious reference: all lines first, then groups between blank lines."""
    *lines, _unfinished = re.split(rb"\r\n|\r|\n", stream)
    events: list[bytes] = []
    data: list[bytes] = []
    for line in lines:
        if line == b"" and data:
            events.append(b"\n".join(data))
            data = []
        if line == b"data" or line.startswith(b"data:"):
            data.append(re.sub(rb"^data:? ?", b"", line))
    return events


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_cut_at_every_byte_changes_nothing(line_end: str) -> None:
    stream = STREAM.replace("\n", line_end).encode()
    expected = [text.encode() for text in EVENTS]
    assert parse_in([stream]) == expected
    assert parse_in([stream[i : i + 1] for i in range(len(stream))]) == expected
    for cut in range(len(stream) + 1):
        assert parse_in([stream[:cut], stream[cut:]]) == expected


@given(
    pieces=st.lists(
        st.sampled_from([b"data: x", b"data:", b"data", b": c", b"datax: y", b"id: 3", b"\n", b"\n", b"\r", b"\r\n"])
    ),
    cuts=st.lists(st.integers(0, 80)),
)
def test_any_cutting_gives_what_the_reference_gives(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[start:end] for start, end in pairwise(edges)]
    assert parse_in(chunks) == parse_whole(stream)


def test_an_event_without_its_blank_line_was_not_sent() -> None:
    assert parse_in([b"data: 1\n\ndata: [DONE]\n"]) == [b"1"]


def test_events_come_out_as_soon_as_they_are_complete() -> None:
    parser = SseParser()
    assert parser.feed(b"data: 1\n\ndata: 2\r") == [b"1"]
    assert parser.feed(b"\r") == [b"2"]
