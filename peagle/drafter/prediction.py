"""Drafts from the client's own prediction of the answer (the `prediction` field of the OpenAI API).

The prediction is followed while the answer agrees with it. After a miss it is aligned anew: the last tokens of the
answer are looked for in the prediction, from the place of the miss on. Owns the alignment. Refuses to know text: the
prediction comes as tokens, made once at the door.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.drafter.lookup import Lookup, TokenHistory

_FOLLOWING = 0.9  # how sure a draft is while the answer follows the prediction
_REALIGNED = 0.7  # and just after it was found again
_LONGEST_ANCHOR = 8
_SHORTEST_ANCHOR = 2


@dataclass(slots=True)
class _Alignment:
    """Where an answer is in its prediction."""

    num_seen: int  # tokens of the history that have been compared
    place: int | None = 0  # the predicted token that comes next; None: lost
    last_place: int = 0  # the place of the last miss, where the search begins
    confidence: float = _FOLLOWING
    pair_ends: dict[tuple[int, int], list[int]] | None = None  # made at the first miss

    def places_of(self, predicted: Sequence[int]) -> dict[tuple[int, int], list[int]]:
        """For each pair of tokens that stand together in the prediction, the places after it."""
        if self.pair_ends is None:
            self.pair_ends = {}
            for end in range(2, len(predicted) + 1):
                self.pair_ends.setdefault((predicted[end - 2], predicted[end - 1]), []).append(end)
        return self.pair_ends


class PredictionLookup:
    """See `TokenLookup`. Sequences without a prediction get nothing."""

    name = "prediction"

    def __init__(self) -> None:
        self._alignments: dict[int, _Alignment] = {}

    def propose(self, history: TokenHistory, *, max_num_drafts: int) -> Lookup:
        """The next tokens of the prediction, if it is known where the answer is in it."""
        predicted = history.predicted
        if not predicted:
            return Lookup()
        alignment = self._alignments.setdefault(history.seq_id, _Alignment(num_seen=history.num_prompt_tokens))
        self._advance(alignment, history)
        if alignment.place is None:
            self._search(alignment, history)
        if alignment.place is None:
            return Lookup()
        token_ids = tuple(predicted[alignment.place : alignment.place + max_num_drafts])
        return Lookup(token_ids=token_ids, confidences=(alignment.confidence,) * len(token_ids))

    def forget(self, seq_id: int) -> None:
        """Drop the alignment."""
        self._alignments.pop(seq_id, None)

    def _advance(self, alignment: _Alignment, history: TokenHistory) -> None:
        for position in range(alignment.num_seen, len(history)):
            place = alignment.place
            if place is None:
                break
            if place < len(history.predicted) and history.predicted[place] == history[position]:
                alignment.place = place + 1
                alignment.confidence = min(_FOLLOWING, alignment.confidence + 0.02)
            else:
                alignment.place, alignment.last_place = None, place
        alignment.num_seen = len(history)

    def _search(self, alignment: _Alignment, history: TokenHistory) -> None:
        """Find the last tokens of the answer in the prediction: the longest match, the nearest behind the miss."""
        if len(history) - history.num_prompt_tokens < _SHORTEST_ANCHOR:
            return
        tail = history.last(min(_LONGEST_ANCHOR, len(history) - history.num_prompt_tokens))
        places = alignment.places_of(history.predicted).get((tail[-2], tail[-1]), ())
        if not places:
            return

        def rank(place: int) -> tuple[int, bool, int]:
            length = _match_length(history.predicted, place, tail)
            return (-length, place < alignment.last_place, abs(place - alignment.last_place))

        alignment.place = min(places, key=rank)
        alignment.confidence = _REALIGNED


def _match_length(predicted: Sequence[int], place: int, tail: list[int]) -> int:
    """How many of the last tokens agree with those before `place`."""
    length = 0
    while length < min(len(tail), place) and predicted[place - 1 - length] == tail[-1 - length]:
        length += 1
    return length
