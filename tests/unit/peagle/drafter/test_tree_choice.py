"""Trees from rankings: what is asked for, what is measured, and that the device and the host halves fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from peagle.drafter.inputs import DraftInputs
from peagle.drafter.interface import DraftBatch, DraftProposal
from peagle.drafter.tree_choice import TreeChoice
from peagle.outputs import ScheduledSequence
from peagle.sampling_params import SamplingParams
from peagle.spec_config import TreeSpec
from tests.builders.head import tiny_head

SPEC = TreeSpec(num_branches=3, depth=2)
HEAD = tiny_head()
VOCAB_SIZE = HEAD.config.draft_vocab_size


def scheduled(seq_id: int, *, start: int = 5, max_next_drafts: int = 6) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=seq_id,
        start=start,
        token_ids=[1],
        num_draft_tokens=0,
        is_sampling=True,
        next_token_id=None,
        max_next_drafts=max_next_drafts,
        block_table=(),
        drafter_block_table=(),
        params=SamplingParams(),
        seed=0,
    )


def logits_of(*rankings: list[int]) -> Tensor:
    """Logits of one sequence with these likeliest tokens at each depth, each half as likely as the one before."""
    logits = torch.full((1, len(rankings), VOCAB_SIZE), -20.0)
    for depth, ranking in enumerate(rankings):
        for rank, token_id in enumerate(ranking):
            logits[0, depth, token_id] = -rank * math.log(2)
    return logits


def propose(
    choice: TreeChoice, logits: Tensor, sequence: ScheduledSequence, emitted: list[int], num_depths: int = 2
) -> DraftProposal:
    batch = DraftBatch(scheduled=(sequence,), output_token_ids=[emitted], features=torch.empty(0, 0), first_rows=[0])
    nothing = torch.empty(0, dtype=torch.int64).numpy()
    inputs = DraftInputs(
        token_ids=nothing,
        feature_rows=nothing,
        slot_mapping=nothing,
        grids=(),
        logits_rows=torch.zeros(1, 2, dtype=torch.int64).numpy(),
        drafting=(0,),
        num_drafts=(num_depths,),
    )
    return choice.propose(batch, inputs, choice.pick(logits))


def test_a_tree_holds_the_candidates_of_each_depth() -> None:
    proposal = propose(TreeChoice(HEAD, SPEC), logits_of([3, 4, 5], [6, 7, 8]), scheduled(0), [9])
    assert proposal.parents is not None
    assert proposal.confidences is not None
    (parents,), tokens = proposal.parents, proposal.draft_token_ids[0].tolist()
    target = {draft: int(HEAD.to_target_ids(torch.tensor(draft))) for draft in range(3, 9)}
    assert len(tokens) == len(parents) == SPEC.num_nodes
    assert (tokens[0], parents[0]) == (target[3], -1), "the likeliest comes first"
    for token_id, parent in zip(tokens, parents, strict=True):
        assert token_id in [target[draft] for draft in ([3, 4, 5] if parent == -1 else [6, 7, 8])]
    assert len(set(zip(tokens, parents, strict=True))) == SPEC.num_nodes
    assert ((proposal.confidences > 0) & (proposal.confidences < 1)).all()


@pytest.mark.parametrize(("max_next_drafts", "num_depths"), [(1, 1), (2, 2), (4, 2), (6, 1)])
def test_no_more_than_was_asked_for(max_next_drafts: int, num_depths: int) -> None:
    choice = TreeChoice(HEAD, SPEC)
    sequence = scheduled(0, max_next_drafts=max_next_drafts)
    proposal = propose(choice, logits_of([3, 4, 5], [6, 7, 8]), sequence, [9], num_depths)
    assert proposal.parents is not None
    (parents,) = proposal.parents
    assert len(parents) == min(max_next_drafts, SPEC.num_nodes if num_depths == 2 else 3)
    if num_depths == 1:
        assert set(parents) == {-1}


def test_one_branch_is_a_chain() -> None:
    proposal = propose(TreeChoice(HEAD, TreeSpec(num_branches=1, depth=2)), logits_of([3], [6]), scheduled(0), [9])
    assert proposal.parents == ((-1, 0),)


def test_broken_logits_draft_nothing() -> None:
    proposal = propose(TreeChoice(HEAD, SPEC), logits_of([3], [6]) * float("nan"), scheduled(0), [9])
    assert proposal.parents == ((),)


def test_what_the_target_says_is_measured() -> None:
    """Also of candidates that had no place in the tree; not after a gap, and not without a result."""
    choice = TreeChoice(HEAD, SPEC)
    before = choice.rates()
    logits = logits_of([3, 4, 5], [6, 7, 8])
    second, third = (int(HEAD.to_target_ids(torch.tensor(draft))) for draft in (4, 8))
    propose(choice, logits, scheduled(0, start=5, max_next_drafts=1), [9])  # the first draft stands at position 7
    assert choice.rates() == before
    propose(choice, logits, scheduled(1, start=6), [second])  # another sequence
    assert choice.rates() == before
    propose(choice, logits, scheduled(0, start=6), [])
    assert choice.rates() == before
    propose(choice, logits, scheduled(0, start=5), [9])
    propose(choice, logits, scheduled(0, start=6), [second, third, 1])
    after = choice.rates()
    assert [after[0][rank] > before[0][rank] for rank in range(3)] == [False, True, False]
    assert [after[1][rank] > before[1][rank] for rank in range(3)] == [False, False, True]
    propose(choice, logits, scheduled(0, start=40), [second])  # a gap
    assert choice.rates() == after


def test_a_depth_that_nobody_asked_for_is_not_measured() -> None:
    """What stands in its place are the logits of another slot."""
    choice = TreeChoice(HEAD, SPEC)
    before = choice.rates()
    logits = logits_of([3, 4, 5], [6, 7, 8])
    first = int(HEAD.to_target_ids(torch.tensor(3)))
    propose(choice, logits, scheduled(0, start=5, max_next_drafts=1), [9], 1)
    propose(choice, logits, scheduled(0, start=6), [first, 9])
    after = choice.rates()
    assert after[0][0] > before[0][0]
    assert after[1] == before[1]


def test_measured_rates_decide_between_equals() -> None:
    """Two candidates that the head finds equally likely: the rank that is right more often comes first."""
    choice = TreeChoice(HEAD, SPEC)
    logits = logits_of([3, 4, 5], [6, 7, 8])
    third = int(HEAD.to_target_ids(torch.tensor(5)))
    for step in range(300):
        propose(choice, logits, scheduled(0, start=step), [third])
    assert propose(choice, logits, scheduled(0, start=300), [third]).draft_token_ids[0, 0] == third
