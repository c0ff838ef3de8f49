"""The noise of sampling: one uniform number for each (seed, position), computed, not drawn.

A generator has a state, and so a token would depend on how many draws came before it: on batching, on preemption, on
how many drafts were rejected. A counter-based hash has none, and this is why speculation, chunking and recomputation
cannot change a sampled token. The mixing is the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), chained over the words of the key.

Owns the hash, which is part of what a seed means: changing it changes every seeded answer. Refuses to know torch and
the platform: integers only.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # odd, bits of the golden ratio: keeps small keys from mixing to small values


def _mix(word: int) -> int:
    """Splitmix64's finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits, the same on every machine.

    Args:
        seed: key of a sequence; negative values wrap to 64 bits.
        position: absolute position of the token that is drawn.
        stream: tells apart independent numbers for the same token.
    """
    word = _mix(_mix(_mix(seed & _MASK) ^ (position & _MASK)) ^ (stream & _MASK))
    return (word >> 11) * 2.0**-53
