"""A drafter's proposal on its way to the host, sequence by sequence.

Owns the cut of padded rows. Refuses to know who proposed.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from peagle.drafter.interface import NO_TOKEN, DraftProposal


@dataclass(frozen=True, slots=True, kw_only=True)
class NextDrafts:
    """What is proposed for the next step of a sequence."""

    token_ids: SequenceOf[int] = ()
    confidences: SequenceOf[float] = ()
    parents: SequenceOf[int] | None = None


def drafts_by_index(proposal: DraftProposal) -> dict[int, NextDrafts]:
    """The drafts of each entry of `scheduled` that has some."""
    confidences = [()] * len(proposal.indices) if proposal.confidences is None else proposal.confidences.tolist()
    parents = [None] * len(proposal.indices) if proposal.parents is None else proposal.parents
    rows = zip(proposal.indices, proposal.draft_token_ids.tolist(), confidences, parents, strict=True)
    drafts = {}
    for index, token_ids, confidence, parent in rows:
        count = sum(token_id != NO_TOKEN for token_id in token_ids)  # what nobody asked for comes last
        drafts[index] = NextDrafts(
            token_ids=token_ids[:count],
            confidences=confidence[:count],
            parents=None if parent is None else parent[:count],
        )
    return drafts
