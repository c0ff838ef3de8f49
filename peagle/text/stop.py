"""Stop strings: find them in text that arrives in pieces, and let nothing of them out.

Owns the matching. Refuses to know tokens: it sees text only, so how tokens split it cannot matter.

The rule, which `match_whole_text` states plainly and `StopMatcher` follows piece by piece:
- the match that *ends* first wins, because it is the first that a reader of the stream can see;
- of several that end at the same character the longest wins, so that no part of any of them gets out;
- text is held back exactly as long as it could be the beginning of a stop string.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """What came of a piece of text.

    Attributes:
        text_to_emit: text that is certain not to be part of a stop string.
        matched: the stop string that ended the answer, or None while it goes on.
    """

    text_to_emit: str
    matched: str | None = None


class StopMatcher:
    """Watches one answer for its stop strings. Time is linear in the text, whatever the strings.

    One prefix automaton for each stop string (Knuth, Morris and Pratt 1977, "Fast pattern matching in strings"):
    its state is the length of the longest beginning of the stop string that ends the text seen so far. So a string
    is matched when its state reaches its length, and the largest state is what must be held back.

    Args:
        stop: stop strings, none empty; may be ().
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        assert all(stop), "an empty stop string would match everywhere"
        self._automata = [_PrefixAutomaton(text) for text in stop]
        self._first_chars = frozenset(text[0] for text in stop)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Take the next piece of the answer. After a match everything is swallowed."""
        if self._matched is not None:
            return StopResult(text_to_emit="", matched=self._matched)
        if not self._held and self._first_chars.isdisjoint(text):  # by far the most common case
            return StopResult(text_to_emit=text)
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            matched = self._advance(char)
            if matched is not None:
                self._matched, self._held = matched, ""
                return StopResult(text_to_emit=seen[: end - len(matched)], matched=matched)
        num_certain = len(seen) - max(automaton.state for automaton in self._automata)
        self._held = seen[num_certain:]
        return StopResult(text_to_emit=seen[:num_certain])

    def flush(self) -> StopResult:
        """The answer has ended: give out what was held back. A second call gives nothing."""
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.state = 0
        return StopResult(text_to_emit=held, matched=self._matched)

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; the longest stop string that ends here, if any."""
        longest: str | None = None
        for automaton in self._automata:
            if automaton.advance(char) and (longest is None or len(automaton.pattern) > len(longest)):
                longest = automaton.pattern
        return longest


class _PrefixAutomaton:
    """How much of the beginning of `pattern` ends the text seen so far."""

    __slots__ = ("_fallback", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        # _fallback[n]: the longest proper beginning of pattern[:n] that also ends it
        self._fallback = [0, 0]
        for char in pattern[1:]:
            self._fallback.append(self._next_state(self._fallback[-1], char))

    def advance(self, char: str) -> bool:
        """Take one character; True if the pattern is complete."""
        self.state = self._next_state(self.state, char)
        return self.state == len(self.pattern)

    def _next_state(self, state: int, char: str) -> int:
        while state and self.pattern[state] != char:
            state = self._fallback[state]
        return state + 1 if self.pattern[state] == char else 0


def match_whole_text(text: str, stop: tuple[str, ...]) -> StopResult:
    """The slow, obvious reference: what must have been emitted once all of `text` has been pushed."""
    for end in range(1, len(text) + 1):
        complete = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if complete:
            longest = max(complete, key=len)
            return StopResult(text_to_emit=text[: end - len(longest)], matched=longest)
    for start in range(len(text)):
        if any(pattern.startswith(text[start:]) for pattern in stop):
            return StopResult(text_to_emit=text[:start])
    return StopResult(text_to_emit=text)
