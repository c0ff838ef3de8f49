"""Several drafters for one sequence: who wins, and who is kept up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from peagle.drafter.interface import DraftBatch, DraftProposal
from peagle.drafter.lookup import Lookup, TokenHistory
from peagle.drafter.mixed import MixedDrafter, expected_accepted
from peagle.drafter.null import NullDrafter
from peagle.outputs import ScheduledSequence
from peagle.sampling_params import SamplingParams


class FixedHead(NullDrafter):
    """Drafts the same for everybody, and remembers whom it was shown."""

    num_speculative_tokens = 3
    num_mask_slots = 2

    def __init__(self, confidences: Sequence[float], parents: tuple[int, ...] | None = None) -> None:
        self.seen: list[list[int]] = []
        self._confidences = confidences
        self._parents = parents

    def propose(self, batch: DraftBatch) -> DraftProposal:
        self.seen.append([scheduled.seq_id for scheduled in batch.scheduled])
        count = len(batch.scheduled)
        return DraftProposal(
            indices=tuple(range(count)),
            draft_token_ids=torch.tensor([[7, 8, 9]] * count),
            confidences=torch.tensor([self._confidences] * count),
            parents=None if self._parents is None else (self._parents,) * count,
        )


class FixedLookup:
    """Finds the same for everybody."""

    name = "fixed"

    def __init__(self, *confidences: float) -> None:
        self.forgotten: list[int] = []
        self._found = Lookup(token_ids=tuple(range(1, len(confidences) + 1)), confidences=confidences)

    def propose(self, history: TokenHistory, *, max_num_drafts: int) -> Lookup:
        found = self._found
        return Lookup(token_ids=found.token_ids[:max_num_drafts], confidences=found.confidences[:max_num_drafts])

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)


def scheduled(seq_id: int, **fields: Any) -> ScheduledSequence:
    values: dict[str, Any] = {
        "seq_id": seq_id,
        "start": 4,
        "token_ids": [5],
        "num_draft_tokens": 0,
        "is_sampling": True,
        "next_token_id": None,
        "max_next_drafts": 3,
        "block_table": [0],
        "drafter_block_table": [0],
        "params": SamplingParams(),
        "seed": 0,
        "known_token_ids": [1, 2, 3, 4, 5],
    }
    return ScheduledSequence(**(values | fields))


def batch(*sequences: ScheduledSequence, new: Sequence[int] = (6,)) -> DraftBatch:
    return DraftBatch(
        scheduled=sequences,
        output_token_ids=tuple(new if one.is_sampling else () for one in sequences),
        features=torch.zeros(len(sequences), 1),
        first_rows=tuple(range(len(sequences))),
    )


def drafts(proposal: DraftProposal) -> dict[int, list[int]]:
    rows = zip(proposal.indices, proposal.draft_token_ids.tolist(), strict=True)
    return {index: [token_id for token_id in row if token_id >= 0] for index, row in rows}


def mixed(head: NullDrafter, *lookups: FixedLookup, max_remembered: int = 8) -> MixedDrafter:
    return MixedDrafter(head, lookups, num_speculative_tokens=4, max_remembered=max_remembered)


def test_what_is_to_be_expected_of_chains_and_trees() -> None:
    assert expected_accepted([0.5, 0.5, 0.5]) == 0.5 + 0.25 + 0.125
    assert expected_accepted([0.5, 0.25, 0.5], [-1, -1, 0]) == 0.5 + 0.25 + 0.25
    assert expected_accepted([]) == 0.0


def test_the_proposal_that_promises_more_wins() -> None:
    assert drafts(mixed(FixedHead([0.9, 0.9, 0.9]), FixedLookup(0.5, 0.5)).propose(batch(scheduled(1)))) == {
        0: [7, 8, 9]
    }
    assert drafts(mixed(FixedHead([0.3, 0.3, 0.3]), FixedLookup(0.5, 0.5)).propose(batch(scheduled(1)))) == {0: [1, 2]}


def test_promises_that_are_not_kept_lose_their_worth() -> None:
    drafter = mixed(FixedHead([0.3, 0.3, 0.3]), FixedLookup(0.5, 0.5))
    first = scheduled(1)
    assert drafts(drafter.propose(batch(first))) == {0: [1, 2]}
    for _ in range(40):  # nothing of it is accepted
        drafter.propose(batch(scheduled(1, token_ids=[5, 1, 2], num_draft_tokens=2)))
    assert drafts(drafter.propose(batch(first))) == {0: [7, 8, 9]}


def test_sequences_without_the_head_are_kept_from_it_and_still_drafted_for() -> None:
    head = FixedHead([0.9, 0.9, 0.9])
    proposal = mixed(head, FixedLookup(0.5)).propose(batch(scheduled(1, uses_head=False), scheduled(2)))
    assert head.seen == [[2]]
    assert drafts(proposal) == {0: [1], 1: [7, 8, 9]}
    nobody = mixed(head, FixedLookup(0.5)).propose(batch(scheduled(3, uses_head=False)))
    assert head.seen == [[2]]
    assert drafts(nobody) == {0: [1]}


def test_nobody_is_drafted_for_who_does_not_want_it() -> None:
    sequences = (scheduled(1, max_next_drafts=0), scheduled(2, is_sampling=False, next_token_id=3))
    assert drafts(mixed(NullDrafter(), FixedLookup(0.5)).propose(batch(*sequences))) == {}


def test_a_tree_beside_a_chain_keeps_its_parents() -> None:
    drafter = mixed(FixedHead([0.9, 0.2, 0.2], parents=(-1, -1, 0)), FixedLookup(0.95, 0.95))
    drafter.propose(batch(scheduled(1)))
    proposal = mixed(FixedHead([0.9, 0.2, 0.2], parents=(-1, -1, 0)), FixedLookup(0.5)).propose(
        batch(scheduled(1), scheduled(2, uses_head=False))
    )
    assert proposal.parents == ((-1, -1, 0), (-1,))


def test_sequences_not_heard_of_for_long_are_forgotten() -> None:
    lookup = FixedLookup(0.5)
    drafter = mixed(NullDrafter(), lookup, max_remembered=2)
    for seq_id in (1, 2, 1, 3):
        drafter.propose(batch(scheduled(seq_id)))
    assert lookup.forgotten == [2]


@pytest.mark.parametrize("count", [1, 2])
def test_confidences_come_along(count: int) -> None:
    proposal = mixed(NullDrafter(), FixedLookup(*[0.5] * count)).propose(batch(scheduled(1)))
    assert proposal.confidences is not None
    assert proposal.confidences.tolist() == [[0.5] * count]
