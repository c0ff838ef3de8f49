"""Losses over sparse targets equal the formulas over whole distributions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.training.config import Loss
from peagle.training.losses import SoftTargets, row_loss, soft_targets
from tests.unit.peagle.training.conversation import random_conversation, target_to_draft

NUM_DRAFT = 200


def case() -> tuple[Tensor, SoftTargets, Tensor]:
    """Logits, targets, and the same targets as whole distributions [m, V_d]."""
    features = random_conversation(60).features
    targets = soft_targets(features.top_ids, features.top_log_probs, target_to_draft(NUM_DRAFT))
    dense = torch.zeros(len(features.rows), NUM_DRAFT, dtype=torch.float64)
    for row, (ids, log_probs) in enumerate(
        zip(features.top_ids.tolist(), features.top_log_probs.tolist(), strict=True)
    ):
        for token_id, log_prob in zip(ids, log_probs, strict=True):
            if token_id < NUM_DRAFT:
                dense[row, token_id] = math.exp(log_prob)
    dense /= dense.sum(-1, keepdim=True)
    logits = torch.randn(dense.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    usable = targets.is_usable
    return logits[usable], targets.select(usable.nonzero()[:, 0]), dense[usable]


def dense_loss(loss: Loss, logits: Tensor, dense: Tensor) -> Tensor:
    if loss == "kl":
        return F.kl_div(logits.log_softmax(-1), dense, reduction="none").sum(-1)
    if loss == "cross_entropy":
        return F.cross_entropy(logits, dense.argmax(-1), reduction="none")
    return 0.5 * (logits.softmax(-1) - dense).abs().sum(-1)


@pytest.mark.parametrize("loss", ["kl", "cross_entropy", "total_variation"])
def test_losses_and_gradients_equal_the_dense_formulas(loss: Loss) -> None:
    logits, targets, dense = case()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, expected = row_loss(loss)(ours, targets), dense_loss(loss, theirs, dense)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0.0)
    (gradient,) = torch.autograd.grad(found.sum(), ours)
    (reference,) = torch.autograd.grad(expected.sum(), theirs)
    torch.testing.assert_close(gradient, reference, atol=1e-10, rtol=0.0)


def test_a_perfect_head_has_no_loss() -> None:
    _, targets, dense = case()
    logits = dense.clamp_min(1e-300).log()
    for loss in ("kl", "total_variation"):
        assert row_loss(loss)(logits, targets).abs().max() < 1e-9


def test_what_cannot_be_drafted_teaches_nothing() -> None:
    log_probs = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]]).log()
    targets = soft_targets(torch.tensor([[7, 1, 2], [1, 7, 2]]), log_probs, torch.tensor([0, 1, 2, 3, 4, 5, 6, -1]))
    assert targets.is_usable.tolist() == [False, True]
    torch.testing.assert_close(targets.probs[1], torch.tensor([6 / 7, 0.0, 1 / 7]))
    assert targets.best_ids.tolist() == [-1, 1]
