"""The order in which sequences are served: who is admitted first, and who is preempted last.

Owns the sort keys of the policies. Refuses to know queues and budgets. Keys compare sequences totally, because ids are
unique and increase with arrival.
"""

from __future__ import annotations

from collections.abc import Callable

from peagle.config import SchedulingPolicy
from peagle.sequence import Sequence, SequenceStatus

OrderKey = tuple[int, bool, int]


def fcfs_key(seq: Sequence) -> OrderKey:
    """First come, first served; preempted sequences before those that never ran."""
    return (0, seq.status is not SequenceStatus.PREEMPTED, seq.seq_id)


def priority_key(seq: Sequence) -> OrderKey:
    """Lower `priority` first; among equals like `fcfs_key`."""
    return (seq.priority, seq.status is not SequenceStatus.PREEMPTED, seq.seq_id)


def order_key(policy: SchedulingPolicy) -> Callable[[Sequence], OrderKey]:
    """The sort key of a policy: smaller is served earlier."""
    return priority_key if policy == "priority" else fcfs_key
