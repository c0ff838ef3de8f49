"""One conversation through a P-EAGLE head: all depths in one pass, under the mask of training.

Owns the rows of the pass. Refuses to know optimisers and files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.training.cod import Elements, sample_elements
from peagle.training.config import LossOptions
from peagle.training.dataset import Example
from peagle.training.element_attention import BlockedAttention
from peagle.training.features import TargetFeatures
from peagle.training.judging import Judge, JudgedRows, compute_in, read_lesson
from peagle.training.partition import partition
from peagle.training.step import StepReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots:
    """What the real slots of a conversation are made of."""

    token_ids: Tensor  # [n]
    features: Tensor  # [n, n_aux * H_t]


class PEagleStep:
    """See `TrainingStep`.

    Args:
        head: in training; float32 weights.
        target_to_draft: [V] int64, -1 for tokens that cannot be drafted.
        depth: K.
        options: loss, COD and partition.
        compute_dtype: type of the matrix products.
    """

    def __init__(
        self,
        head: DraftHead,
        target_to_draft: Tensor,
        *,
        depth: int,
        options: LossOptions,
        compute_dtype: torch.dtype,
    ) -> None:
        self._head = head
        self._target_to_draft = target_to_draft
        self._depth = depth
        self._options = options
        self._judge = Judge(head, options, depth=depth, compute_dtype=compute_dtype)
        self._compute_dtype = compute_dtype

    def backward(
        self, example: Example, features: TargetFeatures, rng: np.random.Generator, *, scale: float
    ) -> StepReport:
        """Add the gradient of the conversation's weighted mean loss, times `scale`; what was seen on the way."""
        device = self._head.device
        lesson = read_lesson(example, features, self._target_to_draft)
        elements = sample_elements(
            lesson.is_judged,
            depth=self._depth,
            retention=self._options.retention,
            floor=self._options.retention_floor,
            rng=rng,
        ).by_chain()
        total = self._judge.weights(lesson, elements.positions, elements.depths).sum()
        report = StepReport(num_conversations=1, num_response_tokens=example.num_response_tokens)
        if total == 0.0:
            return report
        slots = Slots(token_ids=torch.from_numpy(example.token_ids).to(device), features=features.features.to(device))
        for segment in partition(elements, num_slots=len(lesson.rows), num_segments=self._options.segments):
            own = segment.elements
            weights = self._judge.weights(lesson, own.positions, own.depths) * segment.is_own / total  # [T]
            judged = np.flatnonzero(weights)
            if not len(judged):
                continue
            with compute_in(self._compute_dtype, self._head):
                hidden = element_states(self._head, slots, own)[torch.from_numpy(judged).to(device)]  # [m, H]
            rows = JudgedRows(slots=own.positions[judged], depths=own.depths[judged], weights=weights[judged])
            report.add(self._judge.backward(hidden, rows, lesson, scale=scale))
        return report


def element_states(head: DraftHead, slots: Slots, elements: Elements) -> Tensor:
    """Hidden states of elements in the order of `by_chain`, before the final norm: [T, H]."""
    assert head.config.mask_token_id is not None
    device, num_real = head.device, elements.num_real
    anchors = torch.from_numpy(elements.anchors).to(device)
    positions = torch.from_numpy(elements.positions).to(device)
    token_ids = torch.full_like(anchors, head.config.mask_token_id)  # [T]
    token_ids[:num_real] = slots.token_ids[anchors[:num_real] + 1]
    fused = head.fuse(slots.features[anchors[:num_real]])  # [num_real, H]
    fused_mask = head.fused_mask().expand(len(elements) - num_real, -1)
    # In the weights' type: the residual stream adds small numbers to large ones.
    inputs = torch.cat([fused, fused_mask]).to(head.dtype)  # [T, H]
    attend = BlockedAttention(elements, scaling=head.scaling, device=device)
    return head(token_ids, inputs, positions, attend)  # type: ignore[no-any-return]
