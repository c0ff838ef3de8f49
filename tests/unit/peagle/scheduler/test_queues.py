from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peagle.scheduler.policy import priority_key
from peagle.scheduler.queues import WaitingQueue
from tests.builders.scheduler import make_sequence

ACTIONS = st.lists(st.one_of(st.integers(-2, 2), st.just("pop"), st.floats(0, 0.99)), max_size=80)


@given(ACTIONS)
def test_queue_equals_a_sorted_list(actions: list[int | str | float]) -> None:
    """Integers push a sequence of that priority, fractions cancel the one at that share of the list."""
    queue, reference = WaitingQueue(priority_key), []
    for seq_id, action in enumerate(actions):
        if isinstance(action, int):
            seq = make_sequence(seq_id, priority=action)
            queue.push(seq)
            reference.append(seq)
            reference.sort(key=priority_key)
        elif reference and action == "pop":
            assert queue.pop() is reference.pop(0)
        elif reference and isinstance(action, float):
            victim = reference.pop(int(action * len(reference)))
            assert queue.remove(victim.seq_id) is victim
            assert queue.remove(victim.seq_id) is None
        assert len(queue) == len(reference)
        assert {seq.seq_id for seq in queue} == {seq.seq_id for seq in reference}
        if reference:
            assert queue.peek() is reference[0]
            assert reference[0].seq_id in queue


def test_cancelled_entries_do_not_pile_up() -> None:
    queue = WaitingQueue(priority_key)
    queue.push(make_sequence(0, priority=-1))
    for seq_id in range(1, 2000):
        queue.push(make_sequence(seq_id))
        queue.remove(seq_id)
    assert len(queue._heap) < 32
    assert queue.pop().seq_id == 0
