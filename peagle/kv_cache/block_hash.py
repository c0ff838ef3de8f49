"""Hashes that certify the content of full KV blocks.

The KV of a block depends on every token before it, so a block's hash chains its parent's hash with its own tokens. The
root carries the cache salt, which keeps tenants apart. A drafter's slot p pairs the feature of position p with token
p + 1, so a drafter block is certified only together with the one token after it: its *lookahead* token.

A false match would serve one request the context of another, so the hash is cryptographic (BLAKE2b, 256 bits) and not
Python's `hash`. Owns hashing alone; knows neither blocks nor pools.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

DIGEST_BYTES = 32


def root_hash(salt: str | None) -> bytes:
    """The parent of every first block under `salt`. No salt and the empty salt differ."""
    # `surrogatepass`: JSON strings may hold lone surrogates, and a salt must never be able to raise here.
    tag = b"\x00" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
    return blake2b(tag, digest_size=DIGEST_BYTES).digest()


def hash_block(parent: bytes, token_ids: SequenceOf[int]) -> bytes:
    """Hash of one full block: `token_ids` are the block's own tokens, then its lookahead tokens if it has any."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class HashChain:
    """The block hashes of one sequence, computed once each as its tokens become known.

    Valid as long as the sequence's tokens are only appended to, which the scheduler guarantees.
    """

    def __init__(self, *, block_size: int, num_lookahead_tokens: int, salt: str | None) -> None:
        self._block_size = block_size
        self._num_lookahead_tokens = num_lookahead_tokens
        self._hashes: list[bytes] = []
        self._last = root_hash(salt)

    def hashes(self, token_ids: SequenceOf[int]) -> list[bytes]:
        """Hashes of all blocks that `token_ids` certify, from the first block on. Not to be changed by the caller."""
        size = self._block_size
        num_blocks = max(0, len(token_ids) - self._num_lookahead_tokens) // size
        for index in range(len(self._hashes), num_blocks):
            start = index * size
            self._last = hash_block(self._last, token_ids[start : start + size + self._num_lookahead_tokens])
            self._hashes.append(self._last)
        return self._hashes
