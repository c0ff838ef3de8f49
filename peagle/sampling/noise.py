"""The noise of sampling: numbers for each (seed, position, token), computed, not drawn.

A generator has a state, and so a token would depend on how many draws came before it: on batching, on preemption, on
how many drafts were rejected. A counter-based hash has none, and this is why speculation, chunking and recomputation
cannot change a sampled token. The mixing is the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), chained over the words of the key.

Owns the hash, which is part of what a seed means: changing it changes every seeded answer. Refuses to know torch and
the platform: integers only. `race` computes the same numbers for a whole vocabulary at once.
"""

from __future__ import annotations

import math
from enum import IntEnum

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # odd, bits of the golden ratio: keeps small keys from mixing to small values
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


class Stream(IntEnum):
    """Noise for other things than the target's token, of which it must be independent."""

    COINS = 1  # whether a draft is accepted, where that is left to chance
    DRAFTS = 2  # tokens that a drafter draws


def mix(word: int) -> int:
    """Splitmix64's finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    word = (word + GOLDEN) & MASK
    word = ((word ^ (word >> SHIFTS[0])) * MULTIPLIERS[0]) & MASK
    word = ((word ^ (word >> SHIFTS[1])) * MULTIPLIERS[1]) & MASK
    return word ^ (word >> SHIFTS[2])


def row_key(seed: int, position: int) -> int:
    """The 64-bit key of one verified row.

    Args:
        seed: key of a sequence; negative values wrap to 64 bits.
        position: absolute position of the token that is drawn.
    """
    return mix(mix(seed & MASK) ^ (position & MASK))


def step_key(seed: int, position: int, stream: Stream) -> int:
    """The key of a stream in one step, independent of the seed's own noise and of other streams.

    What a step decides can depend on noise for positions that it does not reach in the end, and the next step must not
    meet that noise again. So the key is the step's, not the token's; the i-th number is `uniform(key, i)`, and where a
    step needs one for each token, the i-th row's key is `row_key(key, i)`.

    Args:
        seed: of the sequence.
        position: absolute position of the step's first draft; steps of a sequence differ in it.
        stream: what the noise is for.
    """
    return row_key(row_key(seed, mix(stream)), position)


def uniform(key: int, token_id: int) -> float:
    """A number in (0, 1) with 52 random bits and a half, which a float64 holds exactly; the same on every machine."""
    return ((mix((key + token_id * GOLDEN) & MASK) >> 12) + 0.5) * 2.0**-52


def exponential(key: int, token_id: int) -> float:
    """A number from the exponential distribution with mean 1, above 0."""
    return -math.log1p(-uniform(key, token_id))
