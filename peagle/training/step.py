"""What the trainer asks of a method: the gradient of one conversation.

Owns the seam between the training loop and the methods (`peagle_step`, `eagle3_step`). Refuses to know either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from peagle.training.dataset import Example
from peagle.training.features import TargetFeatures


@dataclass(slots=True, kw_only=True)
class StepReport:
    """Sums over the judged elements of one or more conversations, by depth."""

    loss: float = 0.0
    num_conversations: int = 0
    num_response_tokens: int = 0
    num_elements: list[int] = field(default_factory=list)
    num_matches: list[int] = field(default_factory=list)  # the head's best token is the target's

    def add(self, other: StepReport) -> None:
        """Add another's sums."""
        self.loss += other.loss
        self.num_conversations += other.num_conversations
        self.num_response_tokens += other.num_response_tokens
        for mine, theirs in ((self.num_elements, other.num_elements), (self.num_matches, other.num_matches)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for depth, count in enumerate(theirs):
                mine[depth] += count


class TrainingStep(Protocol):
    """A way to train a head."""

    def backward(
        self, example: Example, features: TargetFeatures, rng: np.random.Generator, *, scale: float
    ) -> StepReport:
        """Add the gradient of the conversation's mean loss, times `scale`, to the head's parameters."""
        ...
