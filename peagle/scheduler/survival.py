"""How likely a draft survives: it is accepted, and every draft before it.

The drafter's confidence says something about a draft; how much, is learned from what was verified: for each depth and
range of confidence the share that was accepted, and for each sequence whether it does better or worse than that.
Sequences with the head and those that lookups alone draft for are learned apart: a head's 0.5 is right more often than
a lookup's. Owns these records. Refuses to know costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

_EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
_PRIOR_WEIGHT = 8.0
_DECAY = 0.998  # of the counts of a cell with each new one: about the last 500 count
_OWN_DECAY = 0.9
_OWN_PRIOR = 4.0


@dataclass(slots=True)
class _Cell:
    checked: float = 0.0
    accepted: float = 0.0


@dataclass(slots=True)
class SequenceRecord:
    """How one sequence compares with what was expected of it."""

    accepted: float = _OWN_PRIOR
    expected: float = _OWN_PRIOR

    @property
    def factor(self) -> float:
        """More than 1 if its drafts do better than others with the same confidence."""
        return min(max(self.accepted / self.expected, 0.5), 1.5)


@dataclass(slots=True)
class SurvivalModel:
    """Learns from every verified proposal."""

    cells: dict[tuple[bool, int, int], _Cell] = field(default_factory=dict)
    records: dict[int, SequenceRecord] = field(default_factory=dict)

    def survivals(self, seq_id: int, confidences: Sequence[float], *, uses_head: bool = True) -> list[float]:
        """Probability that the first i + 1 drafts are accepted, for each i. Never rises."""
        factor = self.records[seq_id].factor if seq_id in self.records else 1.0
        survival, found = 1.0, []
        for depth, confidence in enumerate(confidences):
            survival *= min(self._rate(depth, confidence, uses_head) * factor, 0.99)
            found.append(survival)
        return found

    def observe(self, seq_id: int, confidences: Sequence[float], *, num_accepted: int, uses_head: bool = True) -> None:
        """Count a proposal of which `confidences` were verified."""
        record = self.records.setdefault(seq_id, SequenceRecord())
        for depth, confidence in enumerate(confidences[: num_accepted + 1]):
            is_accepted = depth < num_accepted
            record.expected = record.expected * _OWN_DECAY + self._rate(depth, confidence, uses_head)
            record.accepted = record.accepted * _OWN_DECAY + is_accepted
            cell = self.cells.setdefault((uses_head, depth, bisect_right(_EDGES, confidence)), _Cell())
            cell.checked = cell.checked * _DECAY + 1.0
            cell.accepted = cell.accepted * _DECAY + is_accepted

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        self.records.pop(seq_id, None)

    def _rate(self, depth: int, confidence: float, uses_head: bool) -> float:
        """Share of drafts like this one that are accepted once all before them are."""
        cell = self.cells.get((uses_head, depth, bisect_right(_EDGES, confidence)))
        if cell is None:
            return confidence
        return (cell.accepted + _PRIOR_WEIGHT * confidence) / (cell.checked + _PRIOR_WEIGHT)
