"""Who is next, when many clients wait for few places.

Owns the order: the client with the fewest places goes first, of equals the one whose last turn is longest ago, and each
client's own requests in the order of their arrival. So a client that sends a thousand requests at once waits for
itself, and one that sends a single request hardly waits. Refuses to know places, time and refusals (`admission`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Waiting items by client."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()  # the client whose turn is longest ago is first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        """All items, those of one client in order."""
        for line in self._lines.values():
            yield from line

    def num_waiting(self, client: str) -> int:
        """Items of one client."""
        return len(self._lines.get(client, ()))

    def push(self, client: str, item: T) -> None:
        """Queue an item behind the others of its client. A client that is new waits behind those that are there."""
        self._lines.setdefault(client, deque()).append(item)
        self._size += 1

    def pop(self, num_held: Mapping[str, int]) -> T:
        """Take the next item out. `num_held`: places that each client has; a client without any may be missing."""
        client = min(self._lines, key=lambda name: num_held.get(name, 0))  # of equals, the first
        line = self._lines[client]
        item = line.popleft()
        self._size -= 1
        if line:
            self._lines.move_to_end(client)
        else:
            del self._lines[client]
        return item

    def remove(self, client: str, item: T) -> None:
        """Take an item out that has given up; nothing happens if it is not there."""
        line = self._lines.get(client)
        if line is None or item not in line:
            return
        line.remove(item)
        self._size -= 1
        if not line:
            del self._lines[client]

    def largest_line(self) -> str | None:
        """The client with the most items, or None if nobody waits."""
        return max(self._lines, key=lambda name: len(self._lines[name]), default=None)

    def newest_of(self, client: str) -> T:
        """The item of a client that came last. It stays."""
        return self._lines[client][-1]
