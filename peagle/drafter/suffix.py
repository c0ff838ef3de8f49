"""Drafts by suffix lookup: what usually followed the last tokens, here and in recent answers?

A draft is the most frequent continuation of the longest known context, and the next one continues from there, as long
as it is likely enough. Counts of the sequence itself come before those of recent answers to others. Owns the counts and
their limit. Refuses to know requests. Answers of all clients feed one memory, their prompts do not; a draft is never
shown, only verified, so the memory can change the time that an answer takes and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peagle.drafter.lookup import Lookup, TokenHistory

_MAX_CONTEXT = 8
_PRIOR = 1.0  # occurrences that doubt counts for


@dataclass(slots=True)
class ContinuationCounts:
    """How often each token followed each context of up to `_MAX_CONTEXT` tokens."""

    followers: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)

    def add(self, tokens: list[int], end: int, *, shortest: int) -> None:
        """Count that `tokens[end]` followed the contexts before it."""
        for length in range(shortest, min(_MAX_CONTEXT, end) + 1):
            found = self.followers.setdefault(tuple(tokens[end - length : end]), {})
            found[tokens[end]] = found.get(tokens[end], 0) + 1

    def likeliest(self, context: list[int], *, shortest: int) -> tuple[int, float] | None:
        """The most frequent follower of the longest known context, and how sure it is."""
        for length in range(min(_MAX_CONTEXT, len(context)), shortest - 1, -1):
            found = self.followers.get(tuple(context[len(context) - length :]))
            if found:
                token_id = max(found, key=found.__getitem__)
                return token_id, found[token_id] / (sum(found.values()) + _PRIOR)
        return None


@dataclass(slots=True)
class _OwnTokens:
    """What one sequence has been counted up to."""

    num_counted: int = 0
    counts: ContinuationCounts = field(default_factory=ContinuationCounts)


class SuffixLookup:
    """See `TokenLookup`.

    Args:
        shortest: tokens of context that must match.
        least_confidence: a run of drafts ends where its probability falls below it.
        max_recent_tokens: tokens of answers that are remembered beyond their sequence, about.
    """

    name = "suffix"

    def __init__(self, *, shortest: int = 2, least_confidence: float = 0.1, max_recent_tokens: int = 50_000) -> None:
        self._shortest = shortest
        self._least_confidence = least_confidence
        self._max_recent_tokens = max_recent_tokens
        self._own: dict[int, _OwnTokens] = {}
        self._recent = ContinuationCounts()
        self._previous = ContinuationCounts()
        self._num_recent_tokens = 0

    def propose(self, history: TokenHistory, *, max_num_drafts: int) -> Lookup:
        """The likeliest run, as long as it is likely enough."""
        own = self._own.setdefault(history.seq_id, _OwnTokens())
        self._count(own, history)
        context = history.last(_MAX_CONTEXT)
        token_ids: list[int] = []
        confidences: list[float] = []
        survival = 1.0
        while len(token_ids) < max_num_drafts:
            found = self._likeliest(own, context)
            if found is None or survival * found[1] < self._least_confidence:
                break
            token_ids.append(found[0])
            confidences.append(found[1])
            survival *= found[1]
            context = [*context[-_MAX_CONTEXT + 1 :], found[0]]
        return Lookup(token_ids=tuple(token_ids), confidences=tuple(confidences))

    def forget(self, seq_id: int) -> None:
        """Drop what was counted for the sequence alone."""
        self._own.pop(seq_id, None)

    def _likeliest(self, own: _OwnTokens, context: list[int]) -> tuple[int, float] | None:
        for counts in (own.counts, self._recent, self._previous):
            found = counts.likeliest(context, shortest=self._shortest)
            if found is not None:
                return found
        return None

    def _count(self, own: _OwnTokens, history: TokenHistory) -> None:
        first = own.num_counted
        if first >= len(history):
            return
        start = max(0, first - _MAX_CONTEXT)
        tokens = [history[position] for position in range(start, len(history))]
        for position in range(first, len(history)):
            own.counts.add(tokens, position - start, shortest=self._shortest)
            if position >= history.num_prompt_tokens:
                self._remember(tokens, position - start)
        own.num_counted = len(history)

    def _remember(self, tokens: list[int], end: int) -> None:
        """Count a token of an answer for everybody; two generations, of which the older one is dropped when full."""
        self._recent.add(tokens, end, shortest=self._shortest)
        self._num_recent_tokens += 1
        if self._num_recent_tokens >= self._max_recent_tokens // 2:
            self._previous, self._recent = self._recent, ContinuationCounts()
            self._num_recent_tokens = 0
