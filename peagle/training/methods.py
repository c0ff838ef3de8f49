"""The ways to train a head, by name: how it learns, how it is measured, and whether it has a mask slot.

Owns the list; a further method is a further entry. Refuses to know how any of them works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.training.answer_drafts import DraftAnswer, draft_answer, draft_answer_in_turn
from peagle.training.config import LossOptions, Method
from peagle.training.eagle3_step import Eagle3Step
from peagle.training.peagle_step import PEagleStep
from peagle.training.step import TrainingStep


class MakeStep(Protocol):
    """See `PEagleStep`."""

    def __call__(
        self,
        head: DraftHead,
        target_to_draft: Tensor,
        *,
        depth: int,
        options: LossOptions,
        compute_dtype: torch.dtype,
    ) -> TrainingStep:
        """A step for a head."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMethod:
    """One of them."""

    make_step: MakeStep
    draft_answer: DraftAnswer
    has_mask: bool


def training_method(name: Method) -> TrainingMethod:
    """The method of a name that was checked."""
    return {
        "peagle": TrainingMethod(make_step=PEagleStep, draft_answer=draft_answer, has_mask=True),
        "eagle3": TrainingMethod(make_step=Eagle3Step, draft_answer=draft_answer_in_turn, has_mask=False),
    }[name]
