"""EAGLE-3's unrolled passes: each chain is what drafting in turn would give, and gradients go back through it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.drafter.reference import CausalAttention
from peagle.training.config import LossOptions
from peagle.training.eagle3_step import Eagle3Step, judged_elements, unrolled_states
from peagle.training.judging import read_lesson
from peagle.training.losses import row_loss
from tests.builders.head import tiny_head
from tests.unit.peagle.training.conversation import (
    Conversation,
    assert_same_gradients,
    random_conversation,
    take_gradients,
    target_to_draft,
)

DEPTH = 4


def chain_states(head: DraftHead, one: Conversation, anchor: int, depth: int) -> Tensor:
    """Hidden states of one chain, the whole sequence from scratch at each depth, [depth + 1, H]."""
    fused, states = head.fuse(one.features.features[: anchor + 1]), []
    for d in range(depth + 1):
        tokens, positions = one.token_ids[1 : anchor + d + 2], torch.arange(anchor + d + 1)
        hidden = head(tokens, fused, positions, CausalAttention(scaling=head.scaling))
        states.append(hidden[-1])
        fused = torch.cat([fused, head.norm(hidden[-1:]) if head.config.norm_output else hidden[-1:]])
    return torch.stack(states)


def test_judged_elements_are_chains_of_judged_slots() -> None:
    is_judged = np.array([False, True, True, False, True, False])
    elements = judged_elements(is_judged, depth=4)
    pairs = list(zip(elements.anchors.tolist(), elements.depths.tolist(), strict=True))
    assert pairs == [(1, 0), (2, 0), (4, 0), (0, 1), (1, 1), (3, 1), (0, 2)]


@pytest.mark.parametrize(("num_layers", "norm_output"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("num_tokens", [3, 5, 21])
def test_every_chain_equals_drafting_in_turn(num_layers: int, norm_output: bool, num_tokens: int) -> None:
    head, one = (
        tiny_head(num_hidden_layers=num_layers, norm_output=norm_output),
        random_conversation(num_tokens, seed=num_tokens, num_prompt_tokens=0),
    )
    elements = judged_elements(read_lesson(one.example, one.features, target_to_draft()).is_judged, depth=DEPTH)
    states = unrolled_states(head, one.token_ids, one.features.features, elements)
    assert len(states) == len(elements) > 0
    for state, anchor, depth in zip(states, elements.anchors.tolist(), elements.depths.tolist(), strict=True):
        torch.testing.assert_close(state, chain_states(head, one, anchor, depth)[-1], atol=1e-10, rtol=0.0)


def test_the_gradient_goes_back_through_all_depths() -> None:
    head, one = tiny_head().requires_grad_(True), random_conversation(18)
    options = LossOptions(depth_decay=0.7)
    step = Eagle3Step(head, target_to_draft(250), depth=DEPTH, options=options, compute_dtype=torch.float64)
    report = step.backward(one.example, one.features, np.random.default_rng(0), scale=1.0)
    found = take_gradients(head)

    lesson = read_lesson(one.example, one.features, target_to_draft(250))
    elements = judged_elements(lesson.is_judged, depth=DEPTH)
    losses, weights = [], []
    for anchor, depth in zip(elements.anchors.tolist(), elements.depths.tolist(), strict=True):
        logits = head.logits(chain_states(head, one, anchor, depth)[-1:])
        target = lesson.targets.select(torch.tensor([lesson.rows[anchor + depth]]))
        losses.append(row_loss("kl")(logits, target)[0] * 0.7**depth)
        weights.append(0.7**depth)
    loss = torch.stack(losses).sum() / sum(weights)
    torch.autograd.backward(loss)
    assert report.loss == pytest.approx(float(loss.detach()), abs=1e-10)
    assert report.num_elements == np.bincount(elements.depths, minlength=DEPTH).tolist()
    assert_same_gradients(found, take_gradients(head))


def test_nothing_to_learn_is_no_step() -> None:
    head, one = tiny_head().requires_grad_(True), random_conversation(5, num_prompt_tokens=5)
    step = Eagle3Step(head, target_to_draft(), depth=DEPTH, options=LossOptions(), compute_dtype=torch.float64)
    assert step.backward(one.example, one.features, np.random.default_rng(0), scale=1.0).num_elements == []
    assert take_gradients(head) == {}
