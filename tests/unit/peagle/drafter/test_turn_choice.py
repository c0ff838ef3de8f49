"""Choosing depth by depth is choosing all depths at once, on the same logits."""

from __future__ import annotations

import torch

from peagle.drafter.choice import LikeliestChain
from peagle.drafter.drawn_choice import DrawnChain
from peagle.drafter.interface import DraftBatch
from peagle.drafter.turn_choice import DrawnTurn, LikeliestTurn
from tests.builders.draft_history import DraftHistory, draft_batch
from tests.builders.head import tiny_head

HEAD = tiny_head(vocab_size=40, draft_vocab_size=12, mask_token_id=None)
LOGITS = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def sampling_batch() -> DraftBatch:
    histories = [
        DraftHistory(token_ids=[1, 2, 3], features=torch.zeros(4, 96), block_table=[0], seq_id=seq_id)
        for seq_id in range(2)
    ]
    return draft_batch([history.step(num_rows=9, num_drafts=0, max_next_drafts=3) for history in histories])


def test_likeliest() -> None:
    picked = LikeliestChain(HEAD).pick(LOGITS)
    for depth in range(3):
        turn = LikeliestTurn(HEAD).choose(sampling_batch(), (0, 1), LOGITS[:, depth], depth=depth)
        assert torch.equal(turn.token_ids, picked["token_ids"][:, depth])
        assert torch.equal(turn.confidences, picked["confidences"][:, depth])
        assert turn.probs is None


def test_drawn() -> None:
    batch = sampling_batch()
    drawn = DrawnChain(HEAD).draw(batch, (0, 1), LOGITS)
    for depth in range(3):
        turn = DrawnTurn(HEAD).choose(batch, (0, 1), LOGITS[:, depth], depth=depth)
        assert torch.equal(turn.token_ids, drawn.token_ids[:, depth])
        assert turn.probs is not None
        assert torch.equal(turn.probs, drawn.probs[:, depth])
