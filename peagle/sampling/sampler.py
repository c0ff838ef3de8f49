"""One token for each verified row, drawn from the row's target distribution with the row's own noise.

Terms: a row is *greedy* if its temperature is 0, and then its token is the most likely one (lowest id on ties). Any
other row's token is the winner of a race (`race`) between the tokens that temperature, top_k and top_p leave.

Owns the draw. Refuses to know drafts and sequences: no row sees another, so it does not matter which rows are verified
together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.sampling.argmax import first_argmax
from peagle.sampling.batch import SamplingMetadata
from peagle.sampling.logits import Candidates, sampled_candidates
from peagle.sampling.race import winners


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTokens:
    """What was drawn."""

    token_ids: Tensor  # [R] int64; 0 where there is no distribution to draw from
    is_valid: Tensor  # [R] bool; False where a logit is NaN or +inf, or all are -inf


def sample(logits: Tensor, metadata: SamplingMetadata) -> SampledTokens:
    """Draw one token for each row.

    Args:
        logits: [R, V], any float type; they are not changed.
        metadata: R rows.
    """
    token_ids = first_argmax(logits)  # [R]
    is_valid = logits.gather(1, token_ids[:, None]).squeeze(1).isfinite()
    for candidates in sampled_candidates(logits, metadata):
        token_ids[candidates.rows] = _draw(candidates, metadata.keys[candidates.rows, None])
    return SampledTokens(token_ids=torch.where(is_valid, token_ids, 0), is_valid=is_valid)


def _draw(candidates: Candidates, keys: Tensor) -> Tensor:
    """The race of each row: [G] token ids."""
    column = winners(candidates.weights, keys, candidates.token_ids)[:, None]
    token_ids = column if candidates.token_ids is None else candidates.token_ids.gather(1, column)
    return token_ids.squeeze(1)
