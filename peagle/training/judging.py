"""What a conversation teaches, and the gradient of how far a head is from it.

A slot p predicts the token at p + 2, so it is judged by the target's row p + 1. Logits over a vocabulary are the
largest tensors of a step, and most of its memory; they are made for a few rows at a time and are gone before the next.
Owns which slots are judged, and the pass from hidden states to a loss and back. Refuses to know how hidden states are
made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.training.config import LossOptions
from peagle.training.dataset import Example
from peagle.training.features import TargetFeatures
from peagle.training.losses import SoftTargets, row_loss, soft_targets
from peagle.training.step import StepReport

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# Below the size from which glibc takes fresh pages from the kernel for every tensor (32 MB), each to be zeroed.
_LOGITS_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """The target's say on one conversation of n tokens."""

    targets: SoftTargets  # [m] rows
    rows: IntArray  # [n - 2], row of `targets` that judges what slot p predicts; -1: nothing is learned from it

    @property
    def is_judged(self) -> BoolArray:
        """Slots whose prediction is learned from, [n - 2]."""
        judged: BoolArray = self.rows >= 0
        return judged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgedRows:
    """Which hidden states a pass is judged on."""

    slots: IntArray  # [m], positions
    depths: IntArray  # [m]
    weights: FloatArray  # [m], share of each in the loss


def read_lesson(example: Example, features: TargetFeatures, target_to_draft: Tensor) -> Lesson:
    """Translate the target's distributions into draft tokens; see `soft_targets`."""
    device = target_to_draft.device
    targets = soft_targets(features.top_ids.to(device), features.top_log_probs.to(device), target_to_draft)
    of_row: IntArray = np.full(len(example.token_ids) - 1, -1, dtype=np.int64)
    usable = np.flatnonzero(targets.is_usable.cpu().numpy())
    of_row[features.rows.numpy()[usable]] = usable
    return Lesson(targets=targets, rows=of_row[1:])


class Judge:
    """From hidden states to the loss and back.

    Args:
        head: in training.
        options: loss and its weights.
        depth: K.
        compute_dtype: type of the matrix products.
        logits_bytes: most bytes of logits at a time.
    """

    def __init__(
        self,
        head: DraftHead,
        options: LossOptions,
        *,
        depth: int,
        compute_dtype: torch.dtype,
        logits_bytes: int = _LOGITS_BYTES,
    ) -> None:
        self._head = head
        self._row_loss = row_loss(options.loss)
        self._depth_decay = options.depth_decay
        self._depth = depth
        self._compute_dtype = compute_dtype
        self._logits_bytes = logits_bytes

    def weights(self, lesson: Lesson, slots: IntArray, depths: IntArray) -> FloatArray:
        """Weight of elements relative to each other, [T]; 0 for what is not judged."""
        weights: FloatArray = np.float64(self._depth_decay) ** depths
        weights[~lesson.is_judged[slots]] = 0.0
        return weights

    def backward(self, hidden: Tensor, judged: JudgedRows, lesson: Lesson, *, scale: float) -> StepReport:
        """Add the gradient of the rows' weighted loss, times `scale`, to everything that made `hidden` [m, H].

        Returns:
            Loss, elements and matches of these rows.
        """
        device = hidden.device
        rows = torch.from_numpy(lesson.rows[judged.slots]).to(device)  # [m]
        weights = torch.from_numpy(judged.weights).to(device)
        # The graph is cut here: logits are freed piece by piece, and the pass below is gone back through once.
        leaf = hidden.detach().requires_grad_()
        loss, is_match = 0.0, np.zeros(len(rows), dtype=np.bool_)
        for piece in self._pieces(len(rows), hidden.element_size()):
            logits = self._logits(leaf[piece])
            targets = lesson.targets.select(rows[piece])
            piece_loss = (self._row_loss(logits, targets) * weights[piece].to(logits)).sum()
            torch.autograd.backward(piece_loss * scale)
            loss += float(piece_loss.detach())
            is_match[piece] = (logits.detach().argmax(-1) == targets.best_ids).cpu().numpy()
        torch.autograd.backward(hidden, leaf.grad)
        return StepReport(
            loss=loss,
            num_elements=np.bincount(judged.depths, minlength=self._depth).tolist(),
            num_matches=np.bincount(judged.depths[is_match], minlength=self._depth).tolist(),
        )

    def _pieces(self, num_rows: int, element_size: int) -> list[slice]:
        row_bytes = self._head.config.draft_vocab_size * max(element_size, 4)
        size = max(1, self._logits_bytes // row_bytes)
        return [slice(first, first + size) for first in range(0, num_rows, size)]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[m, V_d], float32 or better."""
        with compute_in(self._compute_dtype, self._head):
            logits = self._head.logits(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def compute_in(dtype: torch.dtype, head: DraftHead) -> torch.autocast:
    """Matrix products in a narrower type than the weights'."""
    return torch.autocast(head.device.type, dtype=dtype, enabled=dtype != head.dtype)
