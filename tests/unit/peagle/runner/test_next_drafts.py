"""Padded rows of a proposal, cut to what each sequence has."""

from __future__ import annotations

import torch

from peagle.drafter.interface import DraftProposal
from peagle.runner.next_drafts import NextDrafts, drafts_by_index

TOKENS = torch.tensor([[5, 6, 7], [8, -1, -1], [-1, -1, -1]])


def test_rows_are_cut_where_nothing_was_drafted() -> None:
    confidences = torch.tensor([[0.5, 0.25, 0.125], [0.75, 0.0, 0.0], [0.0, 0.0, 0.0]])
    proposal = DraftProposal(
        indices=(0, 2, 3), draft_token_ids=TOKENS, confidences=confidences, parents=((-1, 0, 0), (-1,), ())
    )
    assert drafts_by_index(proposal) == {
        0: NextDrafts(token_ids=[5, 6, 7], confidences=[0.5, 0.25, 0.125], parents=(-1, 0, 0)),
        2: NextDrafts(token_ids=[8], confidences=[0.75], parents=(-1,)),
        3: NextDrafts(token_ids=[], confidences=[], parents=()),
    }


def test_chains_name_no_parents_and_confidences_may_be_missing() -> None:
    found = drafts_by_index(DraftProposal(indices=(1, 2, 4), draft_token_ids=TOKENS))
    assert found[1] == NextDrafts(token_ids=[5, 6, 7], confidences=(), parents=None)
    assert found[4] == NextDrafts(token_ids=[], confidences=(), parents=None)
