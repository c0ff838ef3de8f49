"""One pool of KV blocks: who holds which block, and which blocks can serve another prompt.

Owns tables, reference counts, the map from hash to block and eviction. Refuses to know tensors, the other pool, and
when anything is scheduled.

Sharing rules:
- A block is *published* (its hash registered) only after its KV has been written from committed tokens. Until then no
  other sequence can find it, so nobody reads a block that is not written yet.
- Published blocks are full and never written again: a sequence writes only at or after its `num_computed_tokens`.
- When two sequences compute the same content at once, the first to publish is registered. The other's block stays
  private and unhashed, and is empty again once it is freed; blocks after it are published as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from peagle.errors import IntegrityError
from peagle.kv_cache.block import Block, FreeBlocks
from peagle.kv_cache.block_hash import HashChain


@dataclass(slots=True)
class _Table:
    """The blocks of one sequence in order; the first `num_published` need no more publishing."""

    blocks: list[Block] = field(default_factory=list)
    num_published: int = 0


class BlockManager:
    """Bookkeeping of one pool.

    Args:
        num_blocks: blocks in the pool.
        block_size: token slots in a block.
        enable_prefix_caching: False means that nothing is ever published or matched.
        num_lookahead_tokens: tokens after a block that its content also depends on: 0 for the target, 1 for the
            drafter.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_lookahead_tokens: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_lookahead_tokens = num_lookahead_tokens
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlocks(self._blocks)
        self._block_by_hash: dict[bytes, Block] = {}
        self._tables: dict[int, _Table] = {}
        self._chains: dict[int, HashChain] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: empty and cached ones."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Unused blocks that still serve prefix hits."""
        return self._free.num_cached

    @property
    def num_used_blocks(self) -> int:
        """Blocks in some sequence's table."""
        return self.num_blocks - len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use by sequences, 0..1."""
        return self.num_used_blocks / self.num_blocks

    @property
    def seq_ids(self) -> frozenset[int]:
        """Sequences that hold blocks."""
        return frozenset(self._tables)

    def num_blocks_for(self, num_slots: int) -> int:
        """Blocks that cover positions [0, num_slots)."""
        return -(-num_slots // self.block_size)

    def block_table(self, seq_id: int) -> list[int]:
        """Block ids of a sequence in position order (a copy); empty if it holds none."""
        table = self._tables.get(seq_id)
        return [] if table is None else [block.block_id for block in table.blocks]

    def match_prefix(self, seq_id: int, token_ids: SequenceOf[int], salt: str | None) -> list[int]:
        """Ids of the cached blocks that hold the longest known prefix of `token_ids`, from the first block on.

        Changes nothing that others can see: pass the ids, or some first ones, to `allocate` before anything else is
        allocated. `salt` must be the same in every call for one sequence.
        """
        if not self.enable_prefix_caching:
            return []
        matched: list[int] = []
        for block_hash in self._chain(seq_id, salt).hashes(token_ids):
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            matched.append(block.block_id)
        return matched

    def can_allocate(
        self, seq_id: int, *, num_slots: int, prefix_block_ids: SequenceOf[int] = (), num_spare_blocks: int = 0
    ) -> bool:
        """True if `allocate` with the same arguments succeeds and leaves `num_spare_blocks` unused."""
        num_held = len(self._tables[seq_id].blocks) if seq_id in self._tables else 0
        num_new = self.num_blocks_for(num_slots) - num_held - len(prefix_block_ids)
        num_revived = sum(self._blocks[block_id].ref_count == 0 for block_id in prefix_block_ids)
        return num_new <= 0 or num_new + num_revived + num_spare_blocks <= len(self._free)

    def allocate(self, seq_id: int, *, num_slots: int, prefix_block_ids: SequenceOf[int] = ()) -> None:
        """Give a sequence blocks for positions [0, num_slots), on top of what it holds.

        `prefix_block_ids`, from `match_prefix`, become its first blocks; only a sequence that holds none may bring
        them. `can_allocate` must be true.
        """
        table = self._tables.setdefault(seq_id, _Table())
        assert not (prefix_block_ids and table.blocks), "a prefix can only start a table"
        for block_id in prefix_block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
            table.blocks.append(block)
        table.num_published += len(prefix_block_ids)
        while len(table.blocks) < self.num_blocks_for(num_slots):
            table.blocks.append(self._take_block())

    def publish(self, seq_id: int, token_ids: SequenceOf[int], salt: str | None, *, num_computed_tokens: int) -> None:
        """Let others share the full blocks among positions [0, num_computed_tokens).

        Their KV must have been written from `token_ids`, the committed tokens. A block whose lookahead token is not
        known yet is published later.
        """
        if not self.enable_prefix_caching:
            return
        table = self._tables[seq_id]
        num_certified = max(0, min(num_computed_tokens, len(token_ids) - self.num_lookahead_tokens))
        num_full = num_certified // self.block_size
        if num_full <= table.num_published:
            return
        hashes = self._chain(seq_id, salt).hashes(token_ids)
        for index in range(table.num_published, num_full):
            if hashes[index] not in self._block_by_hash:
                block = table.blocks[index]
                block.block_hash = hashes[index]
                self._block_by_hash[hashes[index]] = block
        table.num_published = num_full

    def free(self, seq_id: int) -> None:
        """Drop a sequence's references and forget it; published blocks stay cached until reused. Idempotent."""
        self._chains.pop(seq_id, None)
        table = self._tables.pop(seq_id, None)
        if table is None:
            return
        for block in reversed(table.blocks):
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.push(block)

    def check_integrity(self) -> None:
        """Compare every redundant piece of bookkeeping with the others.

        Raises:
            IntegrityError: with the first contradiction found.
        """
        self._check_references()
        self._check_free_blocks()
        self._check_hashes()

    def _chain(self, seq_id: int, salt: str | None) -> HashChain:
        chain = self._chains.get(seq_id)
        if chain is None:
            chain = HashChain(block_size=self.block_size, num_lookahead_tokens=self.num_lookahead_tokens, salt=salt)
            self._chains[seq_id] = chain
        return chain

    def _take_block(self) -> Block:
        block = self._free.pop()
        if block.block_hash is not None:
            del self._block_by_hash[block.block_hash]
            block.block_hash = None
        block.ref_count = 1
        return block

    def _check_references(self) -> None:
        held = Counter[int]()
        for seq_id, table in self._tables.items():
            ids = [block.block_id for block in table.blocks]
            if len(set(ids)) != len(ids):
                raise IntegrityError(f"sequence {seq_id} holds a block twice: {ids}")
            if table.num_published > len(ids):
                raise IntegrityError(f"sequence {seq_id} published {table.num_published} of {len(ids)} blocks")
            held.update(ids)
        for block in self._blocks:
            if block.ref_count != held[block.block_id]:
                raise IntegrityError(
                    f"block {block.block_id} counts {block.ref_count} references, tables hold {held[block.block_id]}"
                )

    def _check_free_blocks(self) -> None:
        empty, cached = self._free.empty_blocks, self._free.cached_blocks
        for block in (*empty, *cached):
            if block.ref_count != 0:
                raise IntegrityError(f"block {block.block_id} is free and in use")
        for block, is_cached in [(b, False) for b in empty] + [(b, True) for b in cached]:
            if (block.block_hash is not None) != is_cached:
                raise IntegrityError(f"block {block.block_id} is on the wrong free list")
        num_used = sum(block.ref_count > 0 for block in self._blocks)
        distinct = {block.block_id for block in (*empty, *cached)}
        if len(distinct) != len(empty) + len(cached) or len(distinct) + num_used != self.num_blocks:
            raise IntegrityError(
                f"{len(empty)} free + {len(cached)} cached + {num_used} used blocks are not {self.num_blocks}"
            )

    def _check_hashes(self) -> None:
        for block_hash, block in self._block_by_hash.items():
            if block.block_hash != block_hash:
                raise IntegrityError(f"the hash map names block {block.block_id}, which has another hash")
        num_hashed = sum(block.block_hash is not None for block in self._blocks)
        if num_hashed != len(self._block_by_hash):
            raise IntegrityError(f"{num_hashed} blocks have a hash, the map knows {len(self._block_by_hash)}")
        if not self.enable_prefix_caching and num_hashed:
            raise IntegrityError("blocks are published although prefix caching is off")
