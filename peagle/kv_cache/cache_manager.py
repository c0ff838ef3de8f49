"""The KV cache as the scheduler sees it: the target's pool and the drafter's, moved together.

Owns the rules that tie both pools: a prefix hit counts only as far as both have it, and slots are granted in both or in
neither. Refuses to know budgets, queues and tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from peagle.errors import ConfigError, IntegrityError
from peagle.kv_cache.block_manager import BlockManager
from peagle.sequence import Sequence
from peagle.stats import PrefixCacheStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The part of a sequence that the cache already holds: whole blocks, the same number in each pool."""

    num_tokens: int = 0
    target_block_ids: tuple[int, ...] = ()
    drafter_block_ids: tuple[int, ...] = ()


class KVCacheManager:
    """Facade over both pools.

    Args:
        target: the target's pool.
        drafter: the drafter's pool, with one lookahead token; None without speculation.

    Raises:
        ConfigError: the pools differ in block size, or the drafter's does not look ahead.
    """

    def __init__(self, target: BlockManager, drafter: BlockManager | None = None) -> None:
        if drafter is not None and drafter.block_size != target.block_size:
            raise ConfigError(
                f"both KV pools need the same block size, got {target.block_size} and {drafter.block_size}"
            )
        if drafter is not None and drafter.num_lookahead_tokens != 1:
            raise ConfigError("the drafter's pool must be built with num_lookahead_tokens=1")
        self._target = target
        self._drafter = drafter
        self._pools = (target,) if drafter is None else (target, drafter)
        self.prefix_stats = PrefixCacheStats()

    @property
    def block_size(self) -> int:
        """Token slots in a block, the same in both pools."""
        return self._target.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the target's pool."""
        return self._target.num_blocks

    @property
    def max_num_slots(self) -> int:
        """Longest sequence, in tokens, that an otherwise empty cache can hold."""
        return min(pool.num_blocks for pool in self._pools) * self.block_size

    @property
    def num_used_blocks(self) -> int:
        """Blocks in use by sequences, over both pools."""
        return sum(pool.num_used_blocks for pool in self._pools)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0..1, of the fuller pool: that one makes sequences wait."""
        return max(pool.usage for pool in self._pools)

    def match_prefix(self, seq: Sequence) -> PrefixMatch:
        """Find what both pools hold of `seq`; at least its last token is left to compute, or nothing could be sampled.

        Valid until the next allocation.
        """
        num_blocks = (seq.num_tokens - 1) // self.block_size
        target_ids = self._target.match_prefix(seq.seq_id, seq.token_ids, seq.cache_salt)
        if self._drafter is None or not seq.uses_head:
            target_ids = target_ids[:num_blocks]
            return PrefixMatch(num_tokens=len(target_ids) * self.block_size, target_block_ids=tuple(target_ids))
        drafter_ids = self._drafter.match_prefix(seq.seq_id, seq.token_ids, seq.cache_salt)
        num_blocks = min(num_blocks, len(target_ids), len(drafter_ids))
        return PrefixMatch(
            num_tokens=num_blocks * self.block_size,
            target_block_ids=tuple(target_ids[:num_blocks]),
            drafter_block_ids=tuple(drafter_ids[:num_blocks]),
        )

    def allocate_slots(
        self,
        seq: Sequence,
        *,
        num_new_tokens: int,
        num_lookahead_slots: int = 0,
        prefix: PrefixMatch | None = None,
        num_spare_blocks: int = 0,
    ) -> bool:
        """Cover the next `num_new_tokens` rows of `seq` in both pools; all or nothing.

        Args:
            seq: the sequence; its rows start at `num_computed_tokens`, or after `prefix` if one is given.
            num_new_tokens: rows, drafts included.
            num_lookahead_slots: the drafter's mask slots after the rows. The caller keeps them inside the context.
            prefix: what `match_prefix` found, for a sequence that holds no blocks yet.
            num_spare_blocks: blocks that must stay unused in each pool, or the answer is False.

        Returns:
            False, with nothing changed, if blocks are missing.
        """
        start = seq.num_computed_tokens if prefix is None else prefix.num_tokens
        found = prefix or PrefixMatch()
        num_slots = start + num_new_tokens
        wanted = [(self._target, num_slots, found.target_block_ids)]
        if self._drafter is not None and seq.uses_head:
            wanted.append((self._drafter, num_slots + num_lookahead_slots, found.drafter_block_ids))
        for pool, slots, ids in wanted:
            if not pool.can_allocate(
                seq.seq_id, num_slots=slots, prefix_block_ids=ids, num_spare_blocks=num_spare_blocks
            ):
                return False
        for pool, slots, ids in wanted:
            pool.allocate(seq.seq_id, num_slots=slots, prefix_block_ids=ids)
        return True

    def count_lookup(self, seq: Sequence, prefix: PrefixMatch) -> None:
        """Count one request's lookup in the statistics; called once, when it is first scheduled."""
        if self._target.enable_prefix_caching:
            self.prefix_stats.queries += seq.num_tokens
            self.prefix_stats.hits += prefix.num_tokens

    def publish(self, seq: Sequence) -> None:
        """Share the full blocks of `seq` whose KV is written, after a step has been committed."""
        for pool in self._pools if seq.uses_head else (self._target,):
            pool.publish(seq.seq_id, seq.token_ids, seq.cache_salt, num_computed_tokens=seq.num_computed_tokens)

    def free(self, seq_id: int) -> None:
        """Give up a sequence's blocks in both pools. Idempotent."""
        for pool in self._pools:
            pool.free(seq_id)

    def free_drafter(self, seq_id: int) -> None:
        """Give up a sequence's blocks in the drafter's pool alone: it goes on without the head. Idempotent."""
        if self._drafter is not None:
            self._drafter.free(seq_id)

    def block_table(self, seq_id: int) -> list[int]:
        """The target's blocks of a sequence, in position order."""
        return self._target.block_table(seq_id)

    def drafter_block_table(self, seq_id: int) -> list[int]:
        """The drafter's blocks of a sequence, in position order; empty without a drafter, or if it does not use it."""
        if self._drafter is None or seq_id not in self._drafter.seq_ids:
            return []
        return self._drafter.block_table(seq_id)

    @property
    def seq_ids(self) -> frozenset[int]:
        """Sequences that hold blocks."""
        return self._target.seq_ids

    @property
    def drafter_seq_ids(self) -> frozenset[int] | None:
        """Sequences that hold blocks of the drafter's pool; None without one."""
        return None if self._drafter is None else self._drafter.seq_ids

    def check_integrity(self) -> None:
        """Check each pool, and that the drafter's holds no sequence that the target's does not.

        Raises:
            IntegrityError: with the first contradiction found.
        """
        for pool in self._pools:
            pool.check_integrity()
            strays = pool.seq_ids - self._target.seq_ids
            if strays:
                raise IntegrityError(f"the drafter's pool holds sequences that the target's does not: {sorted(strays)}")
