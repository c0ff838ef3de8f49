"""The race by which a token is drawn: each token's exponential noise divided by its weight, and the smallest wins.

The winner is distributed as the weights (the exponential form of the Gumbel-max trick; Maddison, Tarlow and Minka,
"A* sampling", NeurIPS 2014). The inverse of the cumulative distribution would need one number instead of a
vocabulary's worth, and was used first; but there a rounding error in any token moves the borders of all tokens behind
it, and of the many tiny ones in the tail a neighbour is picked instead. In the race an error of 1e-6 changes the winner
with a probability of about 1e-6 (docs/log.md, 2026-12-01).

Owns the noise as tensors, bit for bit that of `noise`. Refuses to know where weights come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.sampling.argmax import first_argmax
from peagle.sampling.noise import GOLDEN, MULTIPLIERS, SHIFTS


def as_int64(word: int) -> int:
    """A 64-bit word as the signed number with the same bits, which is what tensors hold."""
    return word - 2**64 if word >= 2**63 else word


def uniforms(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise in (0, 1) for each row and token, float64.

    Args:
        keys: [G, 1] int64, `noise.row_key` of each row.
        token_ids: [W] or [G, W] int64.

    Returns:
        [G, W].
    """
    word = keys + token_ids * as_int64(GOLDEN)  # integers wrap around, as the definition wants
    word += as_int64(GOLDEN)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        word ^= _shifted(word, shift)
        word *= as_int64(multiplier)
    word ^= _shifted(word, SHIFTS[-1])
    return _shifted(word, 12).double().add_(0.5).mul_(2.0**-52)


def exponentials(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise with mean 1, above 0, for each row and token: shapes as in `uniforms`."""
    return uniforms(keys, token_ids).neg_().log1p_().neg_()


def winners(weights: Tensor, keys: Tensor, token_ids: Tensor | None) -> Tensor:
    """The column that wins in each row: [G] int64. A token without weight never does, unless none has any.

    Args:
        weights: [G, W] float64, not negative.
        keys: [G, 1] int64.
        token_ids: [G, W] int64; None if column and token id are the same.
    """
    if token_ids is None:
        token_ids = torch.arange(weights.shape[1], device=weights.device)
    return first_argmax(weights / exponentials(keys, token_ids))


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros; tensors would fill with the sign."""
    return (word >> bits).bitwise_and_(2 ** (64 - bits) - 1)
