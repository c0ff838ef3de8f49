"""The gradient of a conversation: what a slot sees is what serving sees, and neither parts nor pieces change it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.drafter.reference import reference_drafts
from peagle.training.cod import Elements, sample_elements
from peagle.training.config import LossOptions
from peagle.training.element_attention import DenseAttention
from peagle.training.judging import Judge, JudgedRows, read_lesson
from peagle.training.losses import row_loss
from peagle.training.peagle_step import PEagleStep, Slots, element_states
from peagle.training.step import StepReport
from tests.builders.head import tiny_head
from tests.unit.peagle.training.conversation import (
    Conversation,
    assert_same_gradients,
    random_conversation,
    take_gradients,
    target_to_draft,
)

DEPTH = 5


def trained_head() -> DraftHead:
    return tiny_head(fc_norm_taps=(0, 2)).requires_grad_(True)


def gradients(
    head: DraftHead, one: Conversation, options: LossOptions, *, scale: float = 1.0
) -> tuple[StepReport, dict[str, Tensor]]:
    step = PEagleStep(head, target_to_draft(250), depth=DEPTH, options=options, compute_dtype=torch.float64)
    report = step.backward(one.example, one.features, np.random.default_rng(7), scale=scale)
    return report, take_gradients(head)


def reference_gradients(head: DraftHead, one: Conversation, options: LossOptions) -> tuple[float, dict[str, Tensor]]:
    """Every row at once, under the whole mask, through all logits."""
    lesson = read_lesson(one.example, one.features, target_to_draft(250))
    elements = sample_elements(
        lesson.is_judged,
        depth=DEPTH,
        retention=options.retention,
        floor=options.retention_floor,
        rng=np.random.default_rng(7),
    )
    is_real = torch.from_numpy(elements.depths == 0)
    anchors = torch.from_numpy(elements.anchors)
    assert head.config.mask_token_id is not None
    tokens = torch.where(is_real, one.token_ids[anchors + 1], head.config.mask_token_id)
    fused = torch.where(is_real[:, None], head.fuse(one.features.features[anchors]), head.fused_mask())
    attend = DenseAttention(elements, scaling=head.scaling, device=torch.device("cpu"))
    logits = head.logits(head(tokens, fused, torch.from_numpy(elements.positions), attend))
    rows = lesson.rows[elements.positions]
    judged = np.flatnonzero(rows >= 0)
    losses = row_loss(options.loss)(logits[judged], lesson.targets.select(torch.from_numpy(rows[judged])))
    weights = torch.from_numpy(options.depth_decay ** elements.depths[judged].astype(np.float64))
    loss = (losses * weights).sum() / weights.sum()
    torch.autograd.backward(loss)
    return float(loss.detach()), take_gradients(head)


@pytest.mark.parametrize("loss", ["kl", "cross_entropy", "total_variation"])
@pytest.mark.parametrize("retention", [0.7, 1.0])
def test_the_gradient_is_that_of_the_plain_computation(loss: str, retention: float) -> None:
    head, one = trained_head(), random_conversation(40)
    options = LossOptions(loss=loss, retention=retention, depth_decay=0.8)  # type: ignore[arg-type]
    report, found = gradients(head, one, options)
    expected_loss, expected = reference_gradients(head, one, options)
    assert report.loss == pytest.approx(expected_loss, abs=1e-10)
    assert "mask_hidden" in found
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("num_segments", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("retention", [0.7, 1.0])
def test_segments_do_not_change_the_gradient(num_segments: int, retention: float) -> None:
    head, one = trained_head(), random_conversation(37, seed=num_segments)
    whole, expected = gradients(head, one, LossOptions(retention=retention))
    parts, found = gradients(head, one, LossOptions(retention=retention, segments=num_segments))
    assert_same_gradients(found, expected)
    assert parts.loss == pytest.approx(whole.loss, abs=1e-10)
    assert dataclasses.replace(parts, loss=0.0) == dataclasses.replace(whole, loss=0.0)


def test_pieces_of_the_logits_do_not_change_the_gradient() -> None:
    head, one = trained_head(), random_conversation(40)
    lesson = read_lesson(one.example, one.features, target_to_draft())
    slots = np.flatnonzero(lesson.is_judged)
    depths = slots % 3
    hidden = torch.randn(len(slots), 32, dtype=torch.float64, requires_grad=True)
    found = []
    for logits_bytes in (1, 8 * 300 * 7, 2**30):  # one row at a time, seven, all
        judge = Judge(head, LossOptions(), depth=3, compute_dtype=torch.float64, logits_bytes=logits_bytes)
        weights = judge.weights(lesson, slots, depths)
        rows = JudgedRows(slots=slots, depths=depths, weights=weights)
        report = judge.backward(hidden * 2.0, rows, lesson, scale=3.0)
        assert hidden.grad is not None
        found.append((report, {**take_gradients(head), "hidden": hidden.grad}))
        hidden.grad = None
    for report, gradient in found[:2]:
        assert_same_gradients(gradient, found[2][1])
        assert report.num_matches == found[2][0].num_matches
        assert report.loss == pytest.approx(found[2][0].loss, abs=1e-10)


def test_scale_is_a_factor_on_the_gradient_alone() -> None:
    head, one = trained_head(), random_conversation(30)
    whole, expected = gradients(head, one, LossOptions())
    half, found = gradients(head, one, LossOptions(), scale=0.5)
    assert half.loss == whole.loss
    assert_same_gradients(found, {name: gradient / 2 for name, gradient in expected.items()})


@pytest.mark.parametrize("num_tokens", [3, 6, 17])
def test_a_chain_has_the_logits_that_serving_gives_it(num_tokens: int) -> None:
    head, one = tiny_head(), random_conversation(num_tokens, seed=num_tokens, num_prompt_tokens=0)
    elements = every_element(num_tokens - 2)
    slots = Slots(token_ids=one.token_ids, features=one.features.features)
    logits = head.logits(element_states(head, slots, elements))
    for anchor in range(num_tokens - 2):
        committed = one.token_ids[: anchor + 2].tolist()
        expected = reference_drafts(head, committed, one.features.features[: anchor + 1], DEPTH).logits
        chain = torch.from_numpy(elements.anchors == anchor)
        torch.testing.assert_close(logits[chain], expected[: int(chain.sum())], atol=1e-10, rtol=0.0)


def every_element(num_slots: int) -> Elements:
    pairs = [(anchor, depth) for anchor in range(num_slots) for depth in range(DEPTH) if anchor + depth < num_slots]
    anchors, depths = np.array(pairs).T
    return Elements(anchors=anchors, depths=depths).by_chain()


@pytest.mark.parametrize(("num_tokens", "num_prompt_tokens"), [(1, 0), (2, 1), (5, 5)])
def test_nothing_to_learn_is_no_step(num_tokens: int, num_prompt_tokens: int) -> None:
    one = random_conversation(num_tokens, num_prompt_tokens=num_prompt_tokens)
    report, found = gradients(trained_head(), one, LossOptions())
    assert found == {}
    assert (report.loss, report.num_conversations, report.num_elements) == (0.0, 1, [])


def test_narrow_products_leave_float32_gradients_near_those_of_float32() -> None:
    head, one = tiny_head(dtype=torch.float32).requires_grad_(True), random_conversation(40)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        step = PEagleStep(head, target_to_draft(), depth=DEPTH, options=LossOptions(), compute_dtype=dtype)
        step.backward(one.example, one.features, np.random.default_rng(0), scale=1.0)
        found.append(take_gradients(head))
    exact, narrow = found
    for name, gradient in exact.items():
        assert narrow[name].dtype == torch.float32
        cosine = torch.cosine_similarity(gradient.flatten(), narrow[name].flatten(), dim=0)
        assert cosine > 0.98, name
