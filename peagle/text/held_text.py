"""Text that may be the beginning of a marker, and so must wait.

Owns the search for markers in text that comes in pieces. Refuses to know what a marker means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MarkerSearch:
    """What a search found: text before the first marker, the marker if one is whole, and what is behind it or waits."""

    before: str
    marker: str | None
    rest: str


def find_marker(text: str, markers: Sequence[str]) -> MarkerSearch:
    """The first of `markers` in `text`; where two begin at one place, the longer one.

    Without a marker, `before` is what cannot be part of one whatever follows, and `rest` what can.
    """
    places = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    if places:
        place, _, marker = min(places)
        return MarkerSearch(text[:place], marker, text[place + len(marker) :])
    num_held = max((_num_begun(text, marker) for marker in markers), default=0)
    return MarkerSearch(text[: len(text) - num_held], None, text[len(text) - num_held :])


def _num_begun(text: str, marker: str) -> int:
    """Characters at the end of `text` that `marker` begins with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
