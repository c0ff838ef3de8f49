"""Blocks, and the blocks that no sequence uses.

Owns what one block is (id, references, certified content) and the order in which unused blocks are handed out.
Refuses to know sequences, hashing and the map from hash to block: those are the block manager's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Block:
    """One KV block of `block_size` slots.

    Attributes:
        block_id: index into the pool's storage.
        ref_count: how many sequences' tables hold it.
        block_hash: certifies the content once it is published; None while the content must not be shared.
    """

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None


class FreeBlocks:
    """Blocks without a reference: empty ones, and cached ones in least-recently-used order.

    Every operation is O(1). Empty blocks go out first, because they cost no cached content; then the cached block
    that was released the longest ago. Whoever releases a sequence pushes its tail first, so that the tail, which
    fewer other prompts share, is evicted before the head.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._empty: list[Block] = list(blocks)[::-1]
        self._cached: OrderedDict[int, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unused blocks whose content can still be hit."""
        return len(self._cached)

    @property
    def empty_blocks(self) -> tuple[Block, ...]:
        """Unused blocks without content (for self-checks)."""
        return tuple(self._empty)

    @property
    def cached_blocks(self) -> tuple[Block, ...]:
        """Unused blocks with content, the next victim first (for self-checks)."""
        return tuple(self._cached.values())

    def push(self, block: Block) -> None:
        """Take back a block whose last reference is gone; it becomes the most recently used."""
        assert block.ref_count == 0
        if block.block_hash is None:
            self._empty.append(block)
        else:
            self._cached[block.block_id] = block

    def remove(self, block: Block) -> None:
        """Take out a cached block because a prefix hit uses it again."""
        del self._cached[block.block_id]

    def pop(self) -> Block:
        """Hand out a block to be overwritten. It still carries its hash if it had to be evicted."""
        if self._empty:
            return self._empty.pop()
        return self._cached.popitem(last=False)[1]
