from __future__ import annotations

from peagle.scheduler.policy import order_key
from peagle.sequence import Sequence, SequenceStatus
from tests.builders.scheduler import make_sequence


def served(policy_key: object, *seqs: Sequence) -> list[int]:
    assert callable(policy_key)
    return [seq.seq_id for seq in sorted(seqs, key=policy_key)]


def preempted(seq_id: int, *, priority: int = 0) -> Sequence:
    seq = make_sequence(seq_id, priority=priority)
    seq.status = SequenceStatus.PREEMPTED
    return seq


def test_fcfs_ignores_priority_and_puts_preempted_first() -> None:
    seqs = (make_sequence(0, priority=5), make_sequence(1, priority=1), preempted(7, priority=9), preempted(3))
    assert served(order_key("fcfs"), *seqs) == [3, 7, 0, 1]


def test_priority_comes_before_preemption_and_arrival() -> None:
    seqs = (make_sequence(0, priority=1), make_sequence(1), preempted(9, priority=1), make_sequence(2, priority=-1))
    assert served(order_key("priority"), *seqs) == [2, 1, 9, 0]
