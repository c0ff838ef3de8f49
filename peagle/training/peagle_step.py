"""One conversation through a P-EAGLE head: all depths in one pass, under the mask of training.

Owns the rows of the pass, the dense attention over them, and the loss. Refuses to know optimisers and files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.training.cod import Elements, sample_elements
from peagle.training.config import LossOptions
from peagle.training.dataset import Example
from peagle.training.features import TargetFeatures
from peagle.training.losses import SoftTargets, row_loss, soft_targets
from peagle.training.mask import visible
from peagle.training.partition import partition
from peagle.training.step import StepReport

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


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
        self._row_loss = row_loss(options.loss)
        self._compute_dtype = compute_dtype

    def backward(
        self, example: Example, features: TargetFeatures, rng: np.random.Generator, *, scale: float
    ) -> StepReport:
        """Add the gradient of the conversation's weighted mean loss, times `scale`; what was seen on the way."""
        device = self._head.device
        targets = soft_targets(features.top_ids.to(device), features.top_log_probs.to(device), self._target_to_draft)
        lookup = judging_rows(features, targets, num_tokens=len(example.token_ids))  # [n - 1]
        elements = sample_elements(
            lookup[1:] >= 0,  # slot p is judged by the target's row p + 1
            depth=self._depth,
            retention=self._options.retention,
            floor=self._options.retention_floor,
            rng=rng,
        )
        total = self._weights(elements, lookup).sum()
        report = StepReport(num_conversations=1, num_response_tokens=example.num_response_tokens)
        if total == 0.0:
            return report
        slots = _Slots(token_ids=torch.from_numpy(example.token_ids).to(device), features=features.features.to(device))
        num_slots = len(lookup) - 1
        for segment in partition(elements, num_slots=num_slots, num_segments=self._options.segments):
            weights = self._weights(segment.elements, lookup) * segment.is_own / total  # [T]
            judged = np.flatnonzero(weights)
            if not len(judged):
                continue
            logits = self._logits(slots, segment.elements, judged)  # [m, V_d]
            rows = torch.from_numpy(lookup[segment.elements.positions[judged] + 1]).to(device)
            own = SoftTargets(
                draft_ids=targets.draft_ids[rows], probs=targets.probs[rows], best_ids=targets.best_ids[rows]
            )
            share = torch.from_numpy(weights[judged]).to(logits)
            loss = (self._row_loss(logits, own) * share).sum()
            torch.autograd.backward(loss * scale)
            is_match = (logits.detach().argmax(-1) == own.best_ids).cpu().numpy()
            report.add(_report_of(float(loss.detach()), segment.elements.depths[judged], is_match, self._depth))
        return report

    def _weights(self, elements: Elements, lookup: IntArray) -> FloatArray:
        """Weight of each element in the loss, [T]; 0 for context."""
        weights: FloatArray = np.float64(self._options.depth_decay) ** elements.depths
        weights[lookup[elements.positions + 1] < 0] = 0.0
        return weights

    def _logits(self, slots: _Slots, elements: Elements, judged: IntArray) -> Tensor:
        """Logits of the judged elements, [m, V_d] float32 or better."""
        head, device = self._head, self._head.device
        anchors = torch.from_numpy(elements.anchors).to(device)
        num_real = int((elements.depths == 0).sum())  # real slots come first
        attend = DenseAttention(visible(elements).to(device), scaling=head.scaling)
        with torch.autocast(device.type, dtype=self._compute_dtype, enabled=self._compute_dtype != head.dtype):
            fused = head.fuse(slots.features[anchors[:num_real]])  # [num_real, H]
            fused_mask = head.fused_mask().expand(len(elements) - num_real, -1)
            token_ids = torch.full_like(anchors, head.config.mask_token_id)  # [T]
            token_ids[:num_real] = slots.token_ids[anchors[:num_real] + 1]
            positions = torch.from_numpy(elements.positions).to(device)
            # In the weights' type: the residual stream adds small numbers to large ones.
            inputs = torch.cat([fused, fused_mask]).to(head.dtype)  # [T, H]
            hidden = head(token_ids, inputs, positions, attend)
            logits = head.logits(hidden[torch.from_numpy(judged).to(device)])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slots:
    """What the real slots of a conversation are made of."""

    token_ids: Tensor  # [n]
    features: Tensor  # [n, n_aux * H_t]


class DenseAttention:
    """See `head.Attend`: all rows of a pass at once, under a mask."""

    def __init__(self, visible: Tensor, *, scaling: float) -> None:
        self._visible = visible  # [T, T] bool
        self._scaling = scaling

    def __call__(self, _: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, num_heads, head_dim]."""
        q, k, v = (rows.to(value.dtype).transpose(0, 1)[None] for rows in (query, key, value))
        output = F.scaled_dot_product_attention(q, k, v, self._visible, scale=self._scaling, enable_gqa=True)
        return output[0].transpose(0, 1)


def judging_rows(features: TargetFeatures, targets: SoftTargets, *, num_tokens: int) -> IntArray:
    """For each row r of the target its place in `targets`, [num_tokens - 1]; -1 if nothing is learned from it."""
    lookup: IntArray = np.full(num_tokens - 1, -1, dtype=np.int64)
    usable = np.flatnonzero(targets.is_usable.cpu().numpy())
    lookup[features.rows.numpy()[usable]] = usable
    return lookup


def _report_of(loss: float, depths: IntArray, is_match: npt.NDArray[np.bool_], depth: int) -> StepReport:
    return StepReport(
        loss=loss,
        num_elements=np.bincount(depths, minlength=depth).tolist(),
        num_matches=np.bincount(depths[is_match], minlength=depth).tolist(),
    )
