"""Rule R2: accept a draft with probability min(1, p / q), draw from norm(max(p - q, 0)) where the first one fails.

Standard speculative sampling (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
decoding", 2023, algorithm 1). The emitted tokens are distributed as those of plain decoding, but other than in R1 they
are not the same for the same seed. For certain drafts it accepts as often as R1, for drawn ones more often.

Owns the test. Refuses to know what p went through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.verifier.acceptance import VerifyResult
from peagle.verifier.chain import ChainNoise, DrawnChains, emit, num_judged, ratios


def verify_standard(chains: DrawnChains, noise: ChainNoise, *, is_valid: Tensor | None = None) -> VerifyResult:
    """Judge each draft by itself.

    Args:
        chains: N sequences.
        noise: of the step.
        is_valid: [N, K + 1] bool, whether a row has a p; None if all have.
    """
    judged = num_judged(chains, is_valid)
    columns = torch.arange(chains.draft_token_ids.shape[1], device=judged.device)
    stands = (noise.coins < ratios(chains)) & (columns < judged[:, None])  # [N, K]
    accepted = stands.long().cumprod(1).sum(1)
    weight = torch.ones(accepted.shape, dtype=torch.float64, device=accepted.device)
    return emit(chains, noise, accepted=accepted, judged=judged, weight=weight, is_valid=is_valid)
