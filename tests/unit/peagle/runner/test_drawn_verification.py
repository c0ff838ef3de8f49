"""Distributions of drawn drafts between two steps: used for the very drafts that were drawn, and for no others.

With q = p every drawn draft is accepted, whatever the coins say; a draft that counts as certain is not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from peagle.drafter.interface import DraftBatch, DraftProposal
from peagle.outputs import ScheduledSequence
from peagle.runner.drawn_verification import DrawnVerification
from peagle.sampling_params import SamplingParams
from peagle.spec_config import RejectionSampleMethod

VOCAB_SIZE, NUM_DRAFTS, NUM_SEQS = 8, 3, 60
RULES: tuple[RejectionSampleMethod, ...] = ("standard", "block")


def target_logits() -> Tensor:
    """The same rows for every sequence, [NUM_DRAFTS + 1, V]."""
    return torch.randn(NUM_DRAFTS + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def drawn_tokens() -> list[list[int]]:
    rows = target_logits()[:NUM_DRAFTS].softmax(-1)
    return torch.multinomial(rows, NUM_SEQS, replacement=True, generator=torch.Generator().manual_seed(2)).T.tolist()


def sequence(seq_id: int, drafts: list[int], *, start: int) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=seq_id,
        start=start,
        token_ids=[0, *drafts],
        num_draft_tokens=len(drafts),
        is_sampling=True,
        next_token_id=None,
        max_next_drafts=NUM_DRAFTS,
        block_table=(),
        drafter_block_table=(),
        params=SamplingParams(temperature=1.0),
        seed=seq_id,
    )


def verification_of(rule: RejectionSampleMethod) -> DrawnVerification:
    """With drafts drawn from the target itself for every sequence, to stand behind the token at position 5."""
    verification = DrawnVerification(rule)
    drafts = drawn_tokens()
    verification.remember(
        DraftBatch(
            scheduled=tuple(sequence(seq_id, [], start=4) for seq_id in range(NUM_SEQS)),
            output_token_ids=[[0]] * NUM_SEQS,
            features=torch.empty(0, 0),
            first_rows=[0] * NUM_SEQS,
        ),
        DraftProposal(
            indices=tuple(range(NUM_SEQS)),
            draft_token_ids=torch.tensor(drafts),
            draft_probs=target_logits()[:NUM_DRAFTS].softmax(-1).expand(NUM_SEQS, -1, -1),
        ),
    )
    return verification


def accepted(verification: DrawnVerification, sequences: list[ScheduledSequence]) -> list[int]:
    """Accepted drafts of each sequence."""
    logits = torch.cat([target_logits()[: one.num_draft_tokens + 1] for one in sequences])
    verdicts = verification.verify(sequences, logits)
    return [verdicts[one.seq_id].output.num_accepted_tokens for one in sequences]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_the_first_of_the_drawn_drafts_keep_their_distributions(rule: RejectionSampleMethod, num_drafts: int) -> None:
    sequences = [sequence(i, drafts[:num_drafts], start=5) for i, drafts in enumerate(drawn_tokens())]
    assert accepted(verification_of(rule), sequences) == [num_drafts] * NUM_SEQS


@pytest.mark.parametrize("rule", RULES)
def test_other_drafts_are_certain_ones(rule: RejectionSampleMethod) -> None:
    """Of another position, of another sequence, other tokens, or of the step before the last: some are rejected."""
    sequences = [sequence(i, drafts, start=5) for i, drafts in enumerate(drawn_tokens())]
    verification = verification_of(rule)
    assert min(accepted(verification, [replace(one, start=6) for one in sequences])) < NUM_DRAFTS
    assert min(accepted(verification, [replace(one, seq_id=one.seq_id + NUM_SEQS) for one in sequences])) < NUM_DRAFTS
    others = [replace(one, token_ids=[0, one.token_ids[2], *one.token_ids[2:]]) for one in sequences]
    others = [one for one, drawn in zip(others, sequences, strict=True) if one.token_ids != drawn.token_ids]
    assert min(accepted(verification, others)) < NUM_DRAFTS
    batch = DraftBatch(scheduled=(), output_token_ids=[], features=torch.empty(0, 0), first_rows=[])
    verification.remember(batch, DraftProposal(indices=(), draft_token_ids=torch.empty(0, 0, dtype=torch.int64)))
    assert min(accepted(verification, sequences)) < NUM_DRAFTS


def test_a_row_without_a_distribution_fails_its_own_sequence() -> None:
    sequences = [sequence(i, drafts, start=5) for i, drafts in enumerate(drawn_tokens()[:2])]
    logits = torch.cat([target_logits(), target_logits()])
    logits[0] = float("nan")
    verdicts = verification_of("standard").verify(sequences, logits)
    assert verdicts[0].output.error is not None
    assert verdicts[1].output.error is None
