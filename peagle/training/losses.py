"""How wrong drafts are: the head's distribution against the target's, over the draft vocabulary.

The target's is known by its likeliest tokens; those outside the draft vocabulary are left out and the rest is scaled to
one. Owns the formulas, fast over sparse targets and plainly over dense ones. Refuses to know which rows are judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.training.config import Loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SoftTargets:
    """Distributions of the target over draft tokens, one a row."""

    draft_ids: Tensor  # [m, k] int64; where `probs` is 0, any
    probs: Tensor  # [m, k], each row sums to 1, or to 0 if no likely token can be drafted
    best_ids: Tensor  # [m] int64, the target's likeliest token as a draft id; -1 outside the draft vocabulary

    @property
    def is_usable(self) -> Tensor:
        """Rows that teach something, [m] bool: a head cannot learn to draft what it has no word for."""
        return self.best_ids >= 0

    def select(self, rows: Tensor) -> SoftTargets:
        """Some of the rows, by index [m'] int64."""
        return SoftTargets(draft_ids=self.draft_ids[rows], probs=self.probs[rows], best_ids=self.best_ids[rows])


RowLoss = Callable[[Tensor, SoftTargets], Tensor]  # logits [m, V_d], targets -> [m]


def soft_targets(top_ids: Tensor, top_log_probs: Tensor, target_to_draft: Tensor) -> SoftTargets:
    """Translate the target's likeliest tokens.

    Args:
        top_ids: [m, k] int64, likeliest first.
        top_log_probs: [m, k].
        target_to_draft: [V] int64, -1 for tokens that cannot be drafted.
    """
    draft_ids = target_to_draft[top_ids]  # [m, k]
    probs = top_log_probs.exp().masked_fill(draft_ids < 0, 0.0)
    probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-9)
    return SoftTargets(draft_ids=draft_ids.clamp_min(0), probs=probs, best_ids=draft_ids[:, 0])


def row_loss(name: Loss) -> RowLoss:
    """The function of a loss."""
    return {"kl": kl_divergence, "cross_entropy": cross_entropy, "total_variation": total_variation}[name]


def kl_divergence(logits: Tensor, targets: SoftTargets) -> Tensor:
    """KL(target || head), [m]. Only the target's tokens need the head's probability."""
    log_probs = logits.gather(-1, targets.draft_ids) - logits.logsumexp(-1, keepdim=True)  # [m, k]
    surprise: Tensor = torch.xlogy(targets.probs, targets.probs) - targets.probs * log_probs
    return surprise.sum(-1)


def cross_entropy(logits: Tensor, targets: SoftTargets) -> Tensor:
    """-log of the head's probability of the target's best token, [m]."""
    best = targets.best_ids.clamp_min(0)[:, None]
    return (logits.logsumexp(-1, keepdim=True) - logits.gather(-1, best))[:, 0]


def total_variation(logits: Tensor, targets: SoftTargets) -> Tensor:
    """1 - sum of min(target, head), [m]: the share of sampled drafts that would be rejected."""
    probs = (logits.gather(-1, targets.draft_ids) - logits.logsumexp(-1, keepdim=True)).exp()
    return 1.0 - torch.minimum(probs, targets.probs).sum(-1)
