"""All drafts of an answer in one go equal those made one history at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.drafter.reference import CausalAttention, reference_drafts
from peagle.training.answer_drafts import draft_answer, draft_answer_in_turn
from tests.builders.head import tiny_head

SIZES = pytest.mark.parametrize(("num_prompt_tokens", "num_answer_tokens"), [(1, 2), (1, 9), (7, 2), (5, 11)])


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A head with a small draft vocabulary, and a random conversation."""

    head: DraftHead
    token_ids: Tensor
    features: Tensor


def build_case(num_layers: int, num_tokens: int) -> Case:
    head = tiny_head(num_hidden_layers=num_layers, draft_vocab_size=60)
    head.draft_to_target_offsets.copy_(torch.arange(60) * 4)
    generator = torch.Generator().manual_seed(num_tokens)
    return Case(
        head=head,
        token_ids=torch.randint(300, (num_tokens,), generator=generator),
        features=torch.randn(num_tokens, head.config.feature_size, generator=generator, dtype=torch.float64),
    )


def drafts_in_turn(head: DraftHead, committed: list[int], features: Tensor, num_drafts: int) -> list[int]:
    """EAGLE-3 by hand: the whole sequence from scratch for each draft."""
    slot_tokens, fused = committed[1:], head.fuse(features)
    drafts: list[int] = []
    while True:
        attend = CausalAttention(scaling=head.scaling)
        hidden = head(torch.tensor(slot_tokens + drafts), fused, torch.arange(len(fused)), attend)
        drafts.append(int(head.to_target_ids(head.logits(hidden[-1:]).argmax(-1))))
        if len(drafts) == num_drafts:
            return drafts
        fused = torch.cat([fused, hidden[-1:]])


@pytest.mark.parametrize("num_layers", [1, 3])
@SIZES
def test_parallel_drafts_equal_the_reference(num_layers: int, num_prompt_tokens: int, num_answer_tokens: int) -> None:
    case = build_case(num_layers, num_prompt_tokens + num_answer_tokens)
    drafts = draft_answer(
        case.head, case.token_ids, case.features, num_prompt_tokens=num_prompt_tokens, num_speculative_tokens=5
    )
    assert drafts.shape == (num_answer_tokens - 1, 5)
    for place, row in enumerate(drafts):
        committed = case.token_ids[: num_prompt_tokens + place + 1].tolist()
        logits = reference_drafts(case.head, committed, case.features[: len(committed) - 1], 5).logits
        assert torch.equal(row, case.head.to_target_ids(logits.argmax(-1)))
    assert len(set(drafts.flatten().tolist())) > 1  # not all the same token, which would prove nothing


@pytest.mark.parametrize("num_layers", [1, 2])
@SIZES
def test_drafts_in_turn_equal_the_reference(num_layers: int, num_prompt_tokens: int, num_answer_tokens: int) -> None:
    case = build_case(num_layers, num_prompt_tokens + num_answer_tokens)
    drafts = draft_answer_in_turn(
        case.head, case.token_ids, case.features, num_prompt_tokens=num_prompt_tokens, num_speculative_tokens=4
    )
    for place, row in enumerate(drafts.tolist()):
        committed = case.token_ids[: num_prompt_tokens + place + 1].tolist()
        assert row == drafts_in_turn(case.head, committed, case.features[: len(committed) - 1], 4)
    assert num_answer_tokens == 2 or len(set(drafts.flatten().tolist())) > 1
