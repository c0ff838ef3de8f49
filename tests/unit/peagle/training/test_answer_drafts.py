"""The drafts of an answer in one go equal those made one history at a time, up to the first wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.drafter.reference import CausalAttention, reference_drafts
from peagle.training.answer_drafts import NOT_DRAFTED, draft_answer, draft_answer_in_turn
from tests.builders.head import tiny_head

SIZES = pytest.mark.parametrize(("num_prompt_tokens", "num_answer_tokens"), [(1, 2), (1, 9), (7, 2), (5, 11)])


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A head with a small draft vocabulary, and a random conversation."""

    head: DraftHead
    token_ids: Tensor
    features: Tensor


def build_case(num_layers: int, num_tokens: int, *, norm_output: bool = False) -> Case:
    head = tiny_head(num_hidden_layers=num_layers, draft_vocab_size=60, norm_output=norm_output)
    head.draft_to_target_offsets.copy_(torch.arange(60) * 4)
    generator = torch.Generator().manual_seed(num_tokens)
    return Case(
        head=head,
        token_ids=torch.randint(300, (num_tokens,), generator=generator),
        features=torch.randn(num_tokens, head.config.feature_size, generator=generator, dtype=torch.float64),
    )


def drafts_at_once(head: DraftHead, committed: list[int], features: Tensor, num_drafts: int) -> list[int]:
    logits = reference_drafts(head, committed, features, num_drafts).logits
    ids: list[int] = head.to_target_ids(logits.argmax(-1)).tolist()
    return ids


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
        fused = torch.cat([fused, head.norm(hidden[-1:]) if head.config.norm_output else hidden[-1:]])


Reference = Callable[[DraftHead, list[int], Tensor, int], list[int]]


def plant_right_drafts(case: Case, num_prompt_tokens: int, reference: Reference) -> None:
    """Let the answer follow the drafts for none, one, two, ... tokens in turn."""
    end, num_right = num_prompt_tokens + 1, 0
    while end < len(case.token_ids):
        drafts = reference(case.head, case.token_ids[:end].tolist(), case.features[: end - 1], 5)
        right = drafts[: min(num_right, len(case.token_ids) - end)]
        case.token_ids[end : end + len(right)] = torch.tensor(right)
        end, num_right = end + len(right) + 1, num_right + 1


def looked_at(drafts: list[int], following: list[int]) -> list[int]:
    """What a decode compares: up to the first wrong draft, and no further than the answer goes."""
    wrong = [place for place, (draft, token) in enumerate(zip(drafts, following, strict=False)) if draft != token]
    num_looked_at = min([len(drafts), len(following), *[place + 1 for place in wrong]])
    return drafts[:num_looked_at] + [NOT_DRAFTED] * (len(drafts) - num_looked_at)


@pytest.mark.parametrize("num_layers", [1, 3])
@SIZES
def test_parallel_drafts_equal_the_reference(num_layers: int, num_prompt_tokens: int, num_answer_tokens: int) -> None:
    case = build_case(num_layers, num_prompt_tokens + num_answer_tokens)
    plant_right_drafts(case, num_prompt_tokens, drafts_at_once)
    drafts = draft_answer(
        case.head, case.token_ids, case.features, num_prompt_tokens=num_prompt_tokens, num_speculative_tokens=5
    )
    assert_equal_to_the_reference(case, num_prompt_tokens, drafts, drafts_at_once)


@pytest.mark.parametrize(("num_layers", "norm_output"), [(1, False), (2, False), (1, True)])
@SIZES
def test_drafts_in_turn_equal_the_reference(
    num_layers: int, norm_output: bool, num_prompt_tokens: int, num_answer_tokens: int
) -> None:
    case = build_case(num_layers, num_prompt_tokens + num_answer_tokens, norm_output=norm_output)
    plant_right_drafts(case, num_prompt_tokens, drafts_in_turn)
    drafts = draft_answer_in_turn(
        case.head, case.token_ids, case.features, num_prompt_tokens=num_prompt_tokens, num_speculative_tokens=5
    )
    assert_equal_to_the_reference(case, num_prompt_tokens, drafts, drafts_in_turn)


def assert_equal_to_the_reference(case: Case, num_prompt_tokens: int, drafts: Tensor, reference: Reference) -> None:
    token_ids = case.token_ids.tolist()
    assert drafts.shape == (len(token_ids) - num_prompt_tokens - 1, 5)
    for end, row in enumerate(drafts.tolist(), start=num_prompt_tokens + 1):
        expected = reference(case.head, token_ids[:end], case.features[: end - 1], 5)
        assert row == looked_at(expected, token_ids[end:])
    assert len(drafts) < 8 or bool((drafts[:, 2] != NOT_DRAFTED).any())  # some chains go deep
