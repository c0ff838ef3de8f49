"""Whose turn it is."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.fair_queue import FairQueue

CLIENTS = st.sampled_from("abcd")


def test_a_single_request_passes_a_crowd() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(100):
        queue.push("crowd", f"crowd {index}")
    queue.push("single", "single")
    assert queue.pop({"crowd": 4}) == "single"
    assert queue.pop({"crowd": 4, "single": 1}) == "crowd 0"


def test_equals_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for client in "aaabbc":
        queue.push(client, client)
    assert [queue.pop({}) for _ in range(len(queue))] == ["a", "b", "c", "a", "b", "a"]


@given(st.lists(CLIENTS, max_size=40), st.data())
def test_nothing_is_lost_and_each_client_keeps_its_order(arrivals: list[str], data: st.DataObject) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    left: dict[str, list[int]] = {client: [] for client in "abcd"}
    for index, client in enumerate(arrivals):
        queue.push(client, (client, index))
        left[client].append(index)
        if data.draw(st.booleans()) and len(queue) > 1:
            victim = data.draw(st.sampled_from(sorted(queue)))
            queue.remove(victim[0], victim)
            queue.remove(victim[0], victim)  # the second time it is not there
            left[victim[0]].remove(victim[1])
    held: Counter[str] = Counter()
    while len(queue) > 0:
        fewest = min(held[client] for client in left if left[client])
        client, index = queue.pop(held)
        assert held[client] == fewest
        assert index == left[client].pop(0)
        held[client] += 1
    assert not any(left.values())
    assert queue.largest_line() is None
