"""Drawn drafts follow the distribution that is reported, and confidences say nothing of what was drawn."""

from __future__ import annotations

import torch

from peagle.drafter.drawn_choice import DrawnChain
from peagle.drafter.inputs import DraftInputs
from peagle.drafter.interface import DraftBatch, DraftProposal
from peagle.outputs import ScheduledSequence
from peagle.sampling_params import SamplingParams
from tests.builders.head import tiny_head
from tests.builders.markov import excess

HEAD = tiny_head(vocab_size=12, draft_vocab_size=6, mask_token_id=11)
HEAD.draft_to_target_offsets.copy_(torch.arange(6))  # draft id i is target id 2i
NUM_SEQS, DEPTH = 4000, 2


def propose(params: SamplingParams, logits: torch.Tensor, *, seeds: range, num_drafts: int = DEPTH) -> DraftProposal:
    """Drafts of one sequence for each seed, all from the same logits [DEPTH, V_d]."""
    sequences = tuple(
        ScheduledSequence(
            seq_id=seed,
            start=5,
            token_ids=[1],
            num_draft_tokens=0,
            is_sampling=True,
            next_token_id=None,
            max_next_drafts=num_drafts,
            block_table=(),
            drafter_block_table=(),
            params=params,
            seed=seed,
        )
        for seed in seeds
    )
    nothing = torch.empty(0, dtype=torch.int64).numpy()
    inputs = DraftInputs(
        token_ids=nothing,
        feature_rows=nothing,
        slot_mapping=nothing,
        grids=(),
        logits_rows=torch.zeros(len(seeds), DEPTH, dtype=torch.int64).numpy(),
        drafting=tuple(range(len(seeds))),
        num_drafts=(num_drafts,) * len(seeds),
    )
    batch = DraftBatch(
        scheduled=sequences, output_token_ids=[[3]] * len(seeds), features=torch.empty(0, 0), first_rows=[0]
    )
    choice = DrawnChain(HEAD)
    padded = torch.cat([logits.expand(len(seeds), -1, -1), torch.zeros(2, *logits.shape, dtype=logits.dtype)])
    return choice.propose(batch, inputs, choice.pick(padded))


LOGITS = torch.randn(DEPTH, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1.5


def test_drafts_follow_their_reported_distribution() -> None:
    proposal = propose(SamplingParams(temperature=0.7), LOGITS, seeds=range(NUM_SEQS))
    assert proposal.draft_probs is not None
    assert proposal.confidences is not None
    wanted = (LOGITS / 0.7).softmax(-1)  # [DEPTH, 6]
    assert torch.allclose(proposal.draft_probs[0][:, ::2], wanted)
    assert not proposal.draft_probs[0][:, 1::2].any()
    draft_ids = proposal.draft_token_ids // 2
    counts = torch.bincount(draft_ids[:, 0] * 6 + draft_ids[:, 1], minlength=36).view(6, 6).double()
    assert excess(counts, wanted[0][:, None] * wanted[1]) < 5.0
    assert (proposal.confidences == proposal.confidences[0]).all()


def test_greedy_requests_get_certain_drafts() -> None:
    proposal = propose(SamplingParams(temperature=0.0), LOGITS, seeds=range(3))
    assert proposal.draft_probs is not None
    assert not proposal.draft_probs.any()
    assert proposal.draft_token_ids.tolist() == [(LOGITS.argmax(-1) * 2).tolist()] * 3


def test_no_more_than_was_asked_for() -> None:
    proposal = propose(SamplingParams(temperature=1.0), LOGITS, seeds=range(3), num_drafts=1)
    assert proposal.draft_token_ids[:, 1].tolist() == [-1] * 3
    whole = propose(SamplingParams(temperature=1.0), LOGITS, seeds=range(3))
    assert torch.equal(proposal.draft_token_ids[:, 0], whole.draft_token_ids[:, 0])
