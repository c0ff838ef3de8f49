"""What a step's result must look like, and where an answer ends.

Owns the shape check of runner outputs and the end-of-sequence, stop-token and length rules. Writes nothing; stop
*strings* need text and are matched in `text`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from peagle.outputs import ScheduledSequence, SequenceOutput
from peagle.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTokens:
    """Tokens to commit, and why the sequence ends with them (None: it goes on)."""

    token_ids: SequenceOf[int]
    finish_reason: FinishReason | None


def cut_at_end(seq: Sequence, token_ids: SequenceOf[int]) -> CutTokens:
    """Keep the tokens up to the first that ends `seq`.

    A token that ends the answer is kept: it was sampled and counts as a completion token. A token that both stops and
    reaches the limit stops.
    """
    params = seq.params
    for num_kept, token_id in enumerate(token_ids, start=1):
        is_eos = token_id in seq.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            return CutTokens(token_ids=token_ids[:num_kept], finish_reason=FinishReason.STOP)
        if seq.num_tokens + num_kept >= seq.max_num_tokens:
            return CutTokens(token_ids=token_ids[:num_kept], finish_reason=FinishReason.LENGTH)
    return CutTokens(token_ids=token_ids, finish_reason=None)


def check_output(scheduled: ScheduledSequence, output: SequenceOutput) -> None:
    """Assert that `output` answers `scheduled`, before anything of the step is committed."""
    assert output.seq_id == scheduled.seq_id
    if not scheduled.is_sampling:
        assert not output.token_ids, "a chunk samples nothing"
        assert not output.draft_token_ids, "a chunk drafts nothing"
        return
    accepted = list(output.token_ids[: output.num_accepted_tokens])
    assert len(output.token_ids) == len(accepted) + 1
    assert accepted in _draft_paths(scheduled, len(accepted)), "accepted tokens are drafts"


def _draft_paths(scheduled: ScheduledSequence, length: int) -> list[list[int]]:
    """Runs of `length` drafts, each the child of the one before."""
    drafts = list(scheduled.token_ids[scheduled.num_known_tokens :])
    if scheduled.draft_parents is None:
        return [drafts[:length]]
    runs: list[list[int]] = []  # of each node, from the root down
    for token_id, parent in zip(drafts, scheduled.draft_parents, strict=True):
        runs.append([*(runs[parent] if parent >= 0 else []), token_id])
    return [[], *runs]
