"""Which draft follows, for a head that drafts one token after the other.

Owns the choice at one depth, likeliest or drawn. Refuses to know how logits come about (`eagle3`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peagle.drafter.choice import LikeliestChain
from peagle.drafter.drawn_choice import DrawnChain
from peagle.drafter.head import DraftHead
from peagle.drafter.interface import DraftBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """Drafts of D sequences at one depth."""

    token_ids: Tensor  # [D] int64, target ids
    confidences: Tensor  # [D]
    probs: Tensor | None = None  # [D, V], what each was drawn from; 0 where it was not drawn


class TurnChoice(Protocol):
    """Turns the logits of one depth into drafts."""

    def choose(self, batch: DraftBatch, indices: Sequence[int], logits: Tensor, *, depth: int) -> Turn:
        """Drafts of the entries `indices` of `batch.scheduled`, whose logits are [D, V_d]; the first depth is 0."""
        ...


class LikeliestTurn:
    """The likeliest token. See `TurnChoice`."""

    def __init__(self, head: DraftHead) -> None:
        self._chain = LikeliestChain(head)

    def choose(self, batch: DraftBatch, indices: Sequence[int], logits: Tensor, *, depth: int) -> Turn:
        """See `TurnChoice`."""
        del batch, indices, depth
        picked = self._chain.pick(logits[:, None])
        return Turn(token_ids=picked["token_ids"][:, 0], confidences=picked["confidences"][:, 0])


class DrawnTurn:
    """A token drawn from the head's distribution, given the drafts before it. See `TurnChoice`."""

    def __init__(self, head: DraftHead) -> None:
        self._chain = DrawnChain(head)

    def choose(self, batch: DraftBatch, indices: Sequence[int], logits: Tensor, *, depth: int) -> Turn:
        """See `TurnChoice`."""
        drawn = self._chain.draw(batch, indices, logits[:, None], first_depth=depth)
        return Turn(token_ids=drawn.token_ids[:, 0], confidences=drawn.confidences[:, 0], probs=drawn.probs[:, 0])
