"""Chains whose drafts are drawn from the head's distributions, for the rules R2 and R3.

Where a request samples, draft i is the winner of a race with noise of its own (`Stream.DRAFTS`), independent of the
noise with which the target's tokens are drawn; where it is greedy, the likeliest token is drafted as a certain one. The
head's temperature is the request's. Confidences say nothing of the token that was drawn, only of its distribution: how
many drafts are verified may depend on them, and must not depend on what the drafts are.

Owns the draw. Refuses to know how drafts are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafter.choice import Picked, without_unasked
from peagle.drafter.head import DraftHead
from peagle.drafter.inputs import DraftInputs
from peagle.drafter.interface import DraftBatch, DraftProposal
from peagle.sampling.argmax import first_argmax
from peagle.sampling.logits import at_least_float32
from peagle.sampling.noise import Stream, row_key, step_key
from peagle.sampling.race import as_int64, winners


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Drafts of D sequences at some depths."""

    token_ids: Tensor  # [D, depths] int64, target ids
    confidences: Tensor  # [D, depths]
    probs: Tensor  # [D, depths, V], what each was drawn from; all zero where it is certain


class DrawnChain:
    """See `DraftChoice`.

    Args:
        head: whose logits they are.
    """

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self._target_ids = head.to_target_ids(torch.arange(head.config.draft_vocab_size, device=head.device))  # [V_d]

    def max_num_drafts(self, num_depths: int) -> int:
        """One at each depth."""
        return num_depths

    def pick(self, logits: Tensor) -> dict[str, Tensor]:
        """All of them: noise is no part of a graph."""
        return {"logits": at_least_float32(logits)}

    def propose(self, batch: DraftBatch, inputs: DraftInputs, picked: Picked) -> DraftProposal:
        """See `DraftChoice`."""
        drawn = self.draw(batch, inputs.drafting, picked["logits"][: len(inputs.drafting)])
        return DraftProposal(
            indices=inputs.drafting,
            draft_token_ids=without_unasked(drawn.token_ids, inputs),
            confidences=drawn.confidences,
            draft_probs=drawn.probs,
        )

    def draw(self, batch: DraftBatch, indices: Sequence[int], logits: Tensor, *, first_depth: int = 0) -> Drawn:
        """Draw at some depths, for the entries `indices` of `batch.scheduled`, from logits [D, depths, V_d]."""
        logits = at_least_float32(logits)
        depths = range(first_depth, first_depth + logits.shape[1])
        params = [batch.scheduled[index].params for index in indices]
        is_greedy = torch.tensor([one.is_greedy for one in params], dtype=torch.bool, device=logits.device)
        temperature = torch.tensor(
            [1.0 if one.is_greedy else one.temperature for one in params], dtype=logits.dtype, device=logits.device
        )
        probs = (logits / temperature[:, None, None]).softmax(-1)  # [D, depths, V_d]
        keys = torch.tensor(
            [_keys(batch, index, depths) for index in indices], dtype=torch.int64, device=logits.device
        ).view(-1, 1)  # [D * depths, 1]
        rows = probs.flatten(0, 1)  # [D * depths, V_d]
        drawn = winners(rows.double(), keys, self._target_ids.expand_as(rows)).view(probs.shape[:2])
        likeliest = first_argmax(logits.flatten(0, 1)).view(probs.shape[:2])
        draft_ids = torch.where(is_greedy[:, None], likeliest, drawn)  # [D, depths]
        return Drawn(
            token_ids=self._head.to_target_ids(draft_ids),
            confidences=probs.amax(-1),
            probs=self._over_target_vocab(probs * ~is_greedy[:, None, None]),
        )

    def _over_target_vocab(self, probs: Tensor) -> Tensor:
        """Distributions over target tokens, [D, K, V]; all zero where drafts are certain."""
        whole = probs.new_zeros(*probs.shape[:2], self._head.config.vocab_size)
        return whole.index_copy_(2, self._target_ids, probs)


def _keys(batch: DraftBatch, index: int, depths: range) -> list[int]:
    """Noise of the next step's drafts of one sequence."""
    scheduled = batch.scheduled[index]
    position = scheduled.start + scheduled.num_known_tokens + len(batch.output_token_ids[index])
    key = step_key(scheduled.seed, position, Stream.DRAFTS)
    return [as_int64(row_key(key, depth)) for depth in depths]
