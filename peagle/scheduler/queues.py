"""The queue of sequences that wait for admission.

Owns order and removal. Refuses to know why a sequence waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from peagle.scheduler.policy import OrderKey
from peagle.sequence import Sequence


class WaitingQueue:
    """A priority queue with cancellation.

    Push and pop are O(log n). Removal marks the heap entry as dead and is O(1); dead entries are dropped when they
    surface, or all at once when they outnumber the living ones, so that memory stays proportional to the queue.

    Args:
        key: sort key of a sequence at the time it is pushed; smaller leaves first.
    """

    def __init__(self, key: Callable[[Sequence], OrderKey]) -> None:
        self._key = key
        self._heap: list[tuple[OrderKey, int]] = []  # (key, seq_id)
        self._live: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._live

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences, in no particular order."""
        return iter(self._live.values())

    def push(self, seq: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        assert seq.seq_id not in self._live
        self._live[seq.seq_id] = seq
        heapq.heappush(self._heap, (self._key(seq), seq.seq_id))

    def peek(self) -> Sequence:
        """The sequence to admit next; the queue must not be empty."""
        while self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._live[self._heap[0][1]]

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` shows."""
        seq = self.peek()
        heapq.heappop(self._heap)
        del self._live[seq.seq_id]
        return seq

    def remove(self, seq_id: int) -> Sequence | None:
        """Cancel a sequence wherever it stands; None if it is not in the queue.

        A removed sequence must not be pushed again.
        """
        seq = self._live.pop(seq_id, None)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
        return seq
