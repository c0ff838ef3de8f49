from __future__ import annotations

import pytest

from peagle.errors import IntegrityError
from peagle.scheduler.integrity import check_running, check_waiting
from peagle.sequence import Sequence, SequenceStatus
from tests.builders.scheduler import make_kv, make_sequence


def running_sequence() -> Sequence:
    seq = make_sequence(0, range(6))
    seq.status = SequenceStatus.RUNNING
    return seq


def test_running_sequences_hold_the_blocks() -> None:
    kv, seq = make_kv(), running_sequence()
    with pytest.raises(IntegrityError, match=r"sequences \[\] hold blocks, \[0\] are running"):
        check_running({0: seq}, kv)
    kv.allocate_slots(seq, num_new_tokens=4)
    check_running({0: seq}, kv)
    seq.num_computed_tokens = 5
    with pytest.raises(IntegrityError, match="without blocks"):
        check_running({0: seq}, kv)
    seq.num_computed_tokens = 6
    with pytest.raises(IntegrityError, match="6 computed, 6 known"):
        check_running({0: seq}, kv)
    seq.status = SequenceStatus.WAITING
    with pytest.raises(IntegrityError, match="running as"):
        check_running({0: seq}, kv)


def test_waiting_sequences_start_from_nothing() -> None:
    seq = make_sequence(0)
    check_waiting([seq])
    seq.draft_token_ids = [1]
    with pytest.raises(IntegrityError, match="queued with computed tokens or drafts"):
        check_waiting([seq])
    with pytest.raises(IntegrityError, match="queued as"):
        check_waiting([running_sequence()])
