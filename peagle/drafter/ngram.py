"""Drafts by prompt lookup: where did the last tokens occur before, and what followed?

Owns an index of the n-grams of each sequence, which grows with it. Refuses to look beyond the sequence (`suffix` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peagle.drafter.lookup import Lookup, TokenHistory

_TRUST = 0.5  # of a match of one token; each further one halves the doubt


@dataclass(slots=True)
class _Index:
    """Ends of n-grams: for each length, where an n-gram was last seen (position after it)."""

    num_indexed: int = 0
    last_ends: dict[tuple[int, ...], int] = field(default_factory=dict)


class NGramLookup:
    """See `TokenLookup`.

    Args:
        shortest, longest: tokens that must match, `prompt_lookup_min` and `prompt_lookup_max`.
    """

    name = "ngram"

    def __init__(self, *, shortest: int = 2, longest: int = 4) -> None:
        assert 1 <= shortest <= longest
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[int, _Index] = {}

    def propose(self, history: TokenHistory, *, max_num_drafts: int) -> Lookup:
        """What followed the longest match, the latest one if there are several."""
        index = self._indexes.setdefault(history.seq_id, _Index())
        self._grow(index, history)
        for length in range(min(self._longest, len(history) - 1), self._shortest - 1, -1):
            end = index.last_ends.get(tuple(history.last(length)))
            if end is not None:
                token_ids = _following(history, end, max_num_drafts)
                confidence = 1.0 - _TRUST**length
                return Lookup(token_ids=token_ids, confidences=(confidence,) * len(token_ids))
        return Lookup()

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's index."""
        self._indexes.pop(seq_id, None)

    def _grow(self, index: _Index, history: TokenHistory) -> None:
        """Enter every n-gram that ends before the last token: the last ones are what is looked for."""
        if index.num_indexed > len(history) - 1:  # tokens were taken back, which a cut at the answer's end does
            index.num_indexed = 0
            index.last_ends.clear()
        start = max(0, index.num_indexed - self._longest + 1)
        window = [history[position] for position in range(start, len(history) - 1)]
        for end in range(index.num_indexed, len(history) - 1):
            place = end + 1 - start
            for length in range(self._shortest, self._longest + 1):
                if length <= place:
                    index.last_ends[tuple(window[place - length : place])] = end + 1
        index.num_indexed = max(index.num_indexed, len(history) - 1)


def _following(history: TokenHistory, start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; a text that repeats itself is continued from its own drafts."""
    period = len(history) - start
    return tuple(history[start + offset % period] for offset in range(count))
