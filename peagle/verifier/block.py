"""Rule R3: judge the drafts of a step together, and never accept fewer than R2 does on average.

Block verification (Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444, algorithm 2).
P_i is how much of the probability of the first i drafts is still to be given out: P_0 = 1 and
P_i = min(1, P_{i-1} p_i / q_i). With Z_i = sum of max(P_i p_{i+1} - q_{i+1}, 0), the first i drafts pass with
probability h_i = Z_i / (Z_i + 1 - P_i), and all of them with h = P. The *longest* prefix that passes stands, whether or
not shorter ones do; then a token is drawn from norm(max(P_i p - q, 0)), or from p after the last draft.

The gain over R2 is a draft that was too likely being made up for by a later one that was not likely enough; with
certain drafts there is none. Owns the test. Refuses to know what p went through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.verifier.acceptance import VerifyResult
from peagle.verifier.chain import ChainNoise, DrawnChains, emit, num_judged, ratios, residual


def verify_block(chains: DrawnChains, noise: ChainNoise, *, is_valid: Tensor | None = None) -> VerifyResult:
    """Judge all drafts of a sequence together.

    Args:
        chains: N sequences.
        noise: of the step.
        is_valid: [N, K + 1] bool, whether a row has a p; None if all have.
    """
    judged = num_judged(chains, is_valid)
    step = ratios(chains)  # [N, K]
    mass = torch.ones(judged.shape, dtype=torch.float64, device=judged.device)  # P_i
    weight, accepted = mass, torch.zeros_like(judged)
    for i in range(1, step.shape[1] + 1):
        mass = (mass * step[:, i - 1]).clamp_max(1.0)
        passes = (noise.coins[:, i - 1] < _pass_probs(chains, i, mass, judged)) & (i <= judged)
        accepted = torch.where(passes, i, accepted)
        weight = torch.where(passes, mass, weight)
    return emit(chains, noise, accepted=accepted, judged=judged, weight=weight, is_valid=is_valid)


def _pass_probs(chains: DrawnChains, num: int, mass: Tensor, judged: Tensor) -> Tensor:
    """h of the first `num` drafts, [N]."""
    if num == chains.draft_token_ids.shape[1]:
        return mass
    left = residual(chains, torch.full_like(judged, num), mass).sum(1)  # Z
    whole = left + (1.0 - mass)
    passes = torch.where(whole > 0, left / whole, 1.0)  # 0 / 0: nothing was lost so far, and nothing is left to give
    return torch.where(judged == num, mass, passes)
