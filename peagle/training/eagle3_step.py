"""One conversation through an EAGLE-3 head: K passes, each on what the one before put out.

Training-time test (arXiv 2503.01840, section 3.2): element (anchor a, depth d) holds the token at a + d + 1 and, as its
feature, the head's own hidden state of (a, d - 1), as in serving when every draft was right. Every anchor is unrolled.
Owns the passes. Refuses to know optimisers and files.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.training.chain_attention import ChainAttention
from peagle.training.cod import Elements
from peagle.training.config import LossOptions
from peagle.training.dataset import Example
from peagle.training.features import TargetFeatures
from peagle.training.judging import Judge, JudgedRows, compute_in, read_lesson
from peagle.training.step import StepReport


class Eagle3Step:
    """See `TrainingStep`. Arguments as those of `PEagleStep`; of the options, loss and depth_decay count."""

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
        self._judge = Judge(head, options, depth=depth, compute_dtype=compute_dtype)
        self._compute_dtype = compute_dtype

    def backward(
        self, example: Example, features: TargetFeatures, rng: np.random.Generator, *, scale: float
    ) -> StepReport:
        """Add the gradient of the conversation's weighted mean loss, times `scale`. Nothing is drawn from `rng`."""
        del rng
        device = self._head.device
        lesson = read_lesson(example, features, self._target_to_draft)
        report = StepReport(num_conversations=1, num_response_tokens=example.num_response_tokens)
        elements = judged_elements(lesson.is_judged, depth=self._depth)
        if not len(elements):
            return report
        with compute_in(self._compute_dtype, self._head):
            hidden = unrolled_states(
                self._head, torch.from_numpy(example.token_ids).to(device), features.features.to(device), elements
            )
        weights = self._judge.weights(lesson, elements.positions, elements.depths)
        rows = JudgedRows(slots=elements.positions, depths=elements.depths, weights=weights / weights.sum())
        report.add(self._judge.backward(hidden, rows, lesson, scale=scale))
        return report


def judged_elements(is_judged: npt.NDArray[np.bool_], *, depth: int) -> Elements:
    """Elements that are learned from: judged slots, and chains as long as every further slot is judged.

    An anchor whose own prediction is not judged still begins a chain: in serving the first draft of an answer follows
    the prompt's last slot.
    """
    num_slots = len(is_judged)
    anchors, depths = [np.flatnonzero(is_judged)], [np.zeros(int(is_judged.sum()), dtype=np.int64)]
    alive = np.arange(num_slots)  # anchors
    for d in range(1, depth):
        alive = alive[alive + d < num_slots]
        alive = alive[is_judged[alive + d]]
        anchors.append(alive)
        depths.append(np.full(len(alive), d, dtype=np.int64))
    return Elements(anchors=np.concatenate(anchors), depths=np.concatenate(depths))


def unrolled_states(head: DraftHead, token_ids: Tensor, features: Tensor, elements: Elements) -> Tensor:
    """Hidden states of elements in the order of `judged_elements`, before the final norm: [m, H].

    Args:
        head: in training.
        token_ids: of the conversation, [n].
        features: [n, n_aux * H_t].
        elements: by depth, anchors ascending.
    """
    device, num_slots = token_ids.device, len(token_ids) - 2
    by_depth = [elements.anchors[elements.depths == d] for d in range(int(elements.depths.max()) + 1)]
    begins = by_depth[1] if len(by_depth) > 1 else by_depth[0]  # later depths have some of these
    anchors = torch.from_numpy(begins).to(device)
    attend = ChainAttention(scaling=head.scaling, anchors=anchors)
    # In the weights' type: the residual stream adds small numbers to large ones.
    fused = head.fuse(features[:num_slots]).to(head.dtype)
    states = head(token_ids[1:-1], fused, torch.arange(num_slots, device=device), attend)  # [num_slots, H]
    judged = [states[torch.from_numpy(by_depth[0]).to(device)]]
    states = states[anchors]  # [num_anchors, H]
    for depth, wanted in enumerate(by_depth[1:], start=1):
        # Chains that have ended go on with any token: nobody looks at them again.
        tokens = token_ids[(anchors + depth + 1).clamp_max(len(token_ids) - 1)]
        states = head(tokens, head.feed_back(states), anchors + depth, attend)
        judged.append(states[torch.from_numpy(np.searchsorted(begins, wanted)).to(device)])
    return torch.cat(judged)
