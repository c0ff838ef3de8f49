"""Which drafts are made of the head's logits.

A choice has two halves: `pick` runs on the device at fixed shapes, so that a graph can capture it, and leaves what is
worth a way to the host; `propose` makes drafts of that. Owns the seam and the plain choice, the likeliest token at each
depth. Refuses to know how logits come about (`peagle`) and how drafts are verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.drafter.inputs import DraftInputs
from peagle.drafter.interface import NO_TOKEN, DraftBatch, DraftProposal
from peagle.sampling.argmax import first_argmax

Picked = Mapping[str, Tensor]  # [S, K, ...] each, for S sequences of a grid of which the last ones may be padding


class DraftChoice(Protocol):
    """Turns logits into drafts."""

    def max_num_drafts(self, num_depths: int) -> int:
        """Most drafts of a sequence, from logits of `num_depths` depths."""
        ...

    def pick(self, logits: Tensor) -> dict[str, Tensor]:
        """What `propose` needs of the logits [S, K, V_d]. Must not look at values: it may be captured."""
        ...

    def propose(self, batch: DraftBatch, inputs: DraftInputs, picked: Picked) -> DraftProposal:
        """Drafts for the sequences `inputs.drafting`, which are the first ones in `picked`."""
        ...


class LikeliestChain:
    """A chain of the likeliest token at each depth. See `DraftChoice`.

    Args:
        head: whose logits they are.
    """

    def __init__(self, head: DraftHead) -> None:
        self._head = head

    def max_num_drafts(self, num_depths: int) -> int:
        """One at each depth."""
        return num_depths

    def pick(self, logits: Tensor) -> dict[str, Tensor]:
        """The likeliest tokens and their probabilities."""
        rows = logits.flatten(0, 1)  # [S * K, V_d]
        best = first_argmax(rows)  # [S * K]
        confidences = (rows.gather(-1, best[:, None])[:, 0] - rows.logsumexp(-1)).exp()
        shape = logits.shape[:2]
        return {"token_ids": self._head.to_target_ids(best).view(shape), "confidences": confidences.view(shape)}

    def propose(self, batch: DraftBatch, inputs: DraftInputs, picked: Picked) -> DraftProposal:
        """See `DraftChoice`."""
        num_drafting = len(inputs.drafting)
        return DraftProposal(
            indices=inputs.drafting,
            draft_token_ids=without_unasked(picked["token_ids"][:num_drafting], inputs),
            confidences=picked["confidences"][:num_drafting],
        )


def without_unasked(token_ids: Tensor, inputs: DraftInputs) -> Tensor:
    """Chains [len(drafting), K] with -1 in place of drafts that nobody asked for."""
    unasked = inputs.unasked
    if not unasked.any():
        return token_ids
    return token_ids.masked_fill(torch.from_numpy(unasked).to(token_ids.device), NO_TOKEN)
