"""Chains whose drafts were drawn at random: what the rules R2 and R3 (`rejection`, `block`) have in common.

Terms: p is the target's distribution in a row, q the one that a draft was drawn from. Where a rule does not accept a
draft it draws from the *residual*, what is left of p once q's share is taken out: norm(max(w p - q, 0)) with a weight w
that the rule knows.

A draft to which q gives no probability cannot have been drawn from q; then nobody knows its distribution, and it is
judged as a *certain* one, that is, q is 1 at the draft. So deterministic drafts may stand among drawn ones, with any q
that is 0 there, such as a row of zeros. A q that is not 0 there must be the one that the draft was drawn from.

Owns the noise, the ratios and the last draw. Refuses to know which rule decides how many drafts stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.sampling.noise import Stream, row_key, step_key
from peagle.sampling.race import as_int64, uniforms, winners
from peagle.verifier.acceptance import VerifyResult
from peagle.verifier.layout import NO_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnChains:
    """Drafts of N sequences, and the two distributions of each. Row i is the target's after i drafts, as in R1."""

    target_probs: Tensor  # [N, K + 1, V]; rows past a sequence's drafts are not read
    draft_token_ids: Tensor  # [N, K] int64, padded with -1
    draft_probs: Tensor  # [N, K, V], what each draft was drawn from; not read where there is no draft


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainNoise:
    """Coins that accept drafts, and the keys of the race for the one token that is drawn.

    R3 looks at coins and drafts past the tokens that it emits, so they are the step's own (`noise.step_key`). The race
    of a position is run by one step only, and has the key that it has in R1.
    """

    coins: Tensor  # [N, K] float64 in (0, 1)
    keys: Tensor  # [N, K + 1] int64, `noise.row_key` of the token drawn in each row

    @classmethod
    def build(
        cls, seeds: Sequence[int], positions: Sequence[int], *, num_drafts: int, device: torch.device | str = "cpu"
    ) -> ChainNoise:
        """The noise of one step.

        Args:
            seeds: of the sequences.
            positions: absolute position of each sequence's first draft (of its only token, if it has none).
            num_drafts: K.
            device: of the result.
        """
        pairs = list(zip(seeds, positions, strict=True))
        coin_keys = [as_int64(step_key(seed, position, Stream.COINS)) for seed, position in pairs]
        keys = [[as_int64(row_key(seed, first + i)) for i in range(num_drafts + 1)] for seed, first in pairs]
        columns = torch.arange(num_drafts, device=device)
        return cls(
            coins=uniforms(torch.tensor(coin_keys, dtype=torch.int64, device=device)[:, None], columns),
            keys=torch.tensor(keys, dtype=torch.int64, device=device).view(len(pairs), num_drafts + 1),
        )


def num_judged(chains: DrawnChains, is_valid: Tensor | None) -> Tensor:
    """Drafts that a rule may look at, [N] int64: those before the padding and before the first row without p."""
    is_draft = chains.draft_token_ids != NO_TOKEN  # [N, K]
    if is_valid is not None:
        is_draft = is_draft & is_valid[:, :-1]
    return is_draft.long().cumprod(1).sum(1)


def ratios(chains: DrawnChains) -> Tensor:
    """p / q at each draft, [N, K] float64, finite. Without meaning where there is no draft."""
    drafts = chains.draft_token_ids.clamp_min(0)[..., None]  # [N, K, 1]
    target = chains.target_probs[:, :-1].gather(2, drafts).squeeze(2).double()
    drawn = chains.draft_probs.gather(2, drafts).squeeze(2).double()
    largest = torch.finfo(torch.float64).max  # infinity times a weight of 0 would be NaN
    return torch.where(drawn > 0, target / drawn, target).clamp_max(largest)


def residual(chains: DrawnChains, rows: Tensor, weight: Tensor) -> Tensor:
    """max(w p - q, 0) in one row of each sequence, [N, V] float64; not normalised.

    Args:
        chains: N sequences.
        rows: which row, [N] int64 below K.
        weight: w, [N] float64.
    """
    sequences = torch.arange(rows.shape[0], device=rows.device)
    drafts = chains.draft_token_ids[sequences, rows].clamp_min(0)[:, None]  # [N, 1]
    drawn = chains.draft_probs[sequences, rows].double()  # [N, V]
    certain = torch.zeros_like(drawn).scatter_(1, drafts, 1.0)
    drawn = torch.where(drawn.gather(1, drafts) > 0, drawn, certain)
    return (weight[:, None] * chains.target_probs[sequences, rows].double() - drawn).clamp_min(0)


def emit(
    chains: DrawnChains, noise: ChainNoise, *, accepted: Tensor, judged: Tensor, weight: Tensor, is_valid: Tensor | None
) -> VerifyResult:
    """The accepted drafts and one more token: a recovered one from the residual, or the bonus token from p.

    Args:
        chains: N sequences.
        noise: of the step.
        accepted: drafts that stand, [N] int64.
        judged: see `num_judged`.
        weight: w of the residual, [N] float64.
        is_valid: [N, K + 1] bool, whether a row has a p; None if all have.
    """
    num_drafts = chains.draft_token_ids.shape[1]
    sequences = torch.arange(accepted.shape[0], device=accepted.device)
    weights = chains.target_probs[sequences, accepted].double()  # [N, V]
    if num_drafts > 0:
        left = residual(chains, accepted.clamp_max(num_drafts - 1), weight)
        # Nothing left means that p and q differ by rounding alone, and then p is as good.
        is_recovered = (accepted < judged) & (left.sum(1) > 0)
        weights = torch.where(is_recovered[:, None], left, weights)
    token_ids = winners(weights, noise.keys[sequences, accepted][:, None], None)  # [N]
    columns = torch.arange(num_drafts + 1, device=accepted.device)
    drafts = torch.nn.functional.pad(chains.draft_token_ids, (0, 1), value=NO_TOKEN)
    output = torch.where(columns < accepted[:, None], drafts, NO_TOKEN)
    output[sequences, accepted] = token_ids
    is_emitted = columns <= accepted[:, None]  # [N, K + 1]
    if is_valid is None:
        is_valid = torch.ones_like(is_emitted)
    return VerifyResult(num_accepted_tokens=accepted, output_token_ids=output, is_valid=(is_valid | ~is_emitted).all(1))
