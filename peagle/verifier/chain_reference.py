"""Rules R2 and R3 for one sequence, in plain numbers, as the papers write them. Slow on purpose.

Owns nothing but the definition, the meaning of certain drafts included (`chain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.sampling.noise import exponential
from peagle.verifier.chain import ChainNoise, DrawnChains
from peagle.verifier.layout import NO_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """One sequence of a batch, as lists."""

    target: list[list[float]]
    drafts: list[int]
    drawn: list[list[float]]
    coins: list[float]
    keys: list[int]


def reference_standard(chains: DrawnChains, noise: ChainNoise, index: int) -> list[int]:
    """Tokens that sequence `index` emits by R2."""
    chain = _chain(chains, noise, index)
    for i, draft in enumerate(chain.drafts):
        if chain.coins[i] >= min(1.0, chain.target[i][draft] / chain.drawn[i][draft]):
            return [*chain.drafts[:i], _recover(chain, i, 1.0)]
    return [*chain.drafts, _draw(chain.target[len(chain.drafts)], chain.keys[len(chain.drafts)])]


def reference_block(chains: DrawnChains, noise: ChainNoise, index: int) -> list[int]:
    """Tokens that sequence `index` emits by R3."""
    chain = _chain(chains, noise, index)
    num_drafts = len(chain.drafts)
    masses = [1.0]
    for i, draft in enumerate(chain.drafts):
        masses.append(min(1.0, masses[-1] * (chain.target[i][draft] / chain.drawn[i][draft])))
    longest = 0
    for i in range(1, num_drafts + 1):
        passes = masses[i]
        if i < num_drafts:
            left = sum(_residual(chain, i, masses[i]))
            whole = left + (1.0 - masses[i])
            passes = left / whole if whole > 0 else 1.0
        if chain.coins[i - 1] < passes:
            longest = i
    if longest == num_drafts:
        return [*chain.drafts, _draw(chain.target[longest], chain.keys[longest])]
    return [*chain.drafts[:longest], _recover(chain, longest, masses[longest])]


def _chain(chains: DrawnChains, noise: ChainNoise, index: int) -> _Chain:
    drafts: list[int] = [token_id for token_id in chains.draft_token_ids[index].tolist() if token_id != NO_TOKEN]
    drawn: list[list[float]] = chains.draft_probs[index].tolist()
    for i, draft in enumerate(drafts):
        if drawn[i][draft] == 0.0:
            drawn[i] = [float(token_id == draft) for token_id in range(len(drawn[i]))]
    return _Chain(
        target=chains.target_probs[index].tolist(),
        drafts=drafts,
        drawn=drawn,
        coins=noise.coins[index].tolist(),
        keys=noise.keys[index].tolist(),
    )


def _residual(chain: _Chain, row: int, weight: float) -> list[float]:
    return [max(weight * p - q, 0.0) for p, q in zip(chain.target[row], chain.drawn[row], strict=True)]


def _recover(chain: _Chain, row: int, weight: float) -> int:
    """A token from the residual; from p if rounding has left nothing of it."""
    left = _residual(chain, row, weight)
    return _draw(left if sum(left) > 0 else chain.target[row], chain.keys[row])


def _draw(weights: Sequence[float], key: int) -> int:
    return max(range(len(weights)), key=lambda token_id: (weights[token_id] / exponential(key, token_id), -token_id))
