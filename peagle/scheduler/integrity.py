"""Self-checks of the scheduler's state, for any quiet moment between steps.

Owns what must be true of running and waiting sequences together with the KV cache; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from peagle.errors import IntegrityError
from peagle.kv_cache import KVCacheManager
from peagle.sequence import Sequence, SequenceStatus


def check_running(running: Mapping[int, Sequence], kv: KVCacheManager) -> None:
    """Running sequences, and no others, hold blocks, enough for what they have computed.

    Raises:
        IntegrityError: with the first contradiction found, one inside the pools included.
    """
    kv.check_integrity()
    if kv.seq_ids != running.keys():
        raise IntegrityError(f"sequences {sorted(kv.seq_ids)} hold blocks, {sorted(running)} are running")
    with_head = {seq_id for seq_id, seq in running.items() if seq.uses_head}
    if kv.drafter_seq_ids is not None and kv.drafter_seq_ids != with_head:
        raise IntegrityError(f"sequences {sorted(kv.drafter_seq_ids)} hold drafter blocks, {sorted(with_head)} use it")
    for seq in running.values():
        if seq.status is not SequenceStatus.RUNNING:
            raise IntegrityError(f"sequence {seq.seq_id} is running as {seq.status}")
        if not 0 <= seq.num_computed_tokens < seq.num_tokens < seq.max_num_tokens:
            raise IntegrityError(
                f"sequence {seq.seq_id}: {seq.num_computed_tokens} computed, {seq.num_tokens} known, "
                f"limit {seq.max_num_tokens}"
            )
        if len(kv.block_table(seq.seq_id)) * kv.block_size < seq.num_computed_tokens:
            raise IntegrityError(f"sequence {seq.seq_id} has computed tokens without blocks")


def check_waiting(waiting: Iterable[Sequence]) -> None:
    """Waiting sequences start from nothing.

    Raises:
        IntegrityError: with the first contradiction found.
    """
    for seq in waiting:
        if seq.status not in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED):
            raise IntegrityError(f"sequence {seq.seq_id} is queued as {seq.status}")
        if seq.num_computed_tokens or seq.draft_token_ids:
            raise IntegrityError(f"sequence {seq.seq_id} is queued with computed tokens or drafts")
