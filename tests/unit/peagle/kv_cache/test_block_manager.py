from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peagle.errors import IntegrityError
from peagle.kv_cache import BlockManager


def fill(pool: BlockManager, seq_id: int, tokens: list[int], salt: str | None = None) -> list[int]:
    """Allocate, publish and return the block table, as a sequence that computed all its tokens would."""
    pool.allocate(seq_id, num_slots=len(tokens))
    pool.publish(seq_id, tokens, salt, num_computed_tokens=len(tokens))
    return pool.block_table(seq_id)


def test_published_blocks_are_shared_and_counted() -> None:
    pool = BlockManager(8, 2)
    table = fill(pool, 0, [1, 2, 3, 4, 5])
    matched = pool.match_prefix(1, [1, 2, 3, 4, 9], None)
    assert matched == table[:2]
    pool.allocate(1, num_slots=5, prefix_block_ids=matched)
    assert pool.block_table(1)[:2] == table[:2]
    assert (pool.num_used_blocks, pool.usage) == (4, 0.5)
    pool.free(0)
    pool.check_integrity()
    assert pool.num_used_blocks == 3
    pool.free(1)
    pool.free(1)
    pool.check_integrity()
    assert (pool.num_used_blocks, pool.num_cached_blocks, pool.num_free_blocks) == (0, 2, 8)


def test_a_block_is_invisible_until_it_is_published() -> None:
    pool = BlockManager(8, 2)
    pool.allocate(0, num_slots=4)
    assert pool.match_prefix(1, [1, 2, 3, 4], None) == []
    pool.publish(0, [1, 2, 3, 4], None, num_computed_tokens=3)
    assert pool.match_prefix(2, [1, 2, 3, 4], None) == pool.block_table(0)[:1]
    pool.publish(0, [1, 2, 3, 4], None, num_computed_tokens=4)
    assert pool.match_prefix(3, [1, 2, 3, 4], None) == pool.block_table(0)


def test_lookahead_token_certifies_a_drafter_block() -> None:
    pool = BlockManager(8, 2, num_lookahead_tokens=1)
    pool.allocate(0, num_slots=4)
    pool.publish(0, [1, 2, 3, 4], None, num_computed_tokens=4)
    table = pool.block_table(0)
    assert pool.match_prefix(1, [1, 2, 3, 9, 9], None) == table[:1]
    assert pool.match_prefix(2, [1, 2, 9], None) == []
    assert pool.match_prefix(3, [1, 2, 3, 4, 5], None) == table[:1], "token 4 is not known to be followed by 5"
    pool.publish(0, [1, 2, 3, 4, 5], None, num_computed_tokens=4)
    assert pool.match_prefix(4, [1, 2, 3, 4, 5], None) == table
    assert pool.match_prefix(5, [1, 2, 3, 4, 6], None) == table[:1]


@pytest.mark.parametrize(("theirs", "mine"), [(None, "a"), ("a", None), ("a", "b"), (None, "")])
def test_salts_do_not_share(theirs: str | None, mine: str | None) -> None:
    pool = BlockManager(8, 2)
    fill(pool, 0, [1, 2], theirs)
    assert pool.match_prefix(1, [1, 2], mine) == []
    assert pool.match_prefix(2, [1, 2], theirs) == pool.block_table(0)


def test_eviction_takes_the_least_recently_used_sequence_tail_first() -> None:
    pool = BlockManager(4, 2)
    old, new = fill(pool, 0, [1, 2, 3, 4]), fill(pool, 1, [5, 6, 7, 8])
    pool.free(0)
    pool.free(1)
    pool.allocate(2, num_slots=2)
    assert pool.block_table(2) == [old[1]]
    assert pool.match_prefix(3, [1, 2, 3, 4], None) == old[:1], "the head survives its tail"
    pool.allocate(3, num_slots=2, prefix_block_ids=old[:1])
    pool.allocate(2, num_slots=6)
    assert pool.block_table(2) == [old[1], new[1], new[0]]
    assert pool.match_prefix(4, [5, 6], None) == []
    pool.check_integrity()


def test_duplicate_content_keeps_the_first_registration() -> None:
    pool = BlockManager(8, 2)
    first, second = fill(pool, 0, [1, 2, 3, 4]), fill(pool, 1, [1, 2, 3, 4, 5, 6])
    assert pool.match_prefix(2, [1, 2, 3, 4, 5, 6], None) == [*first, second[2]]
    pool.free(1)
    assert pool.num_cached_blocks == 1, "only the block that the first sequence does not have stays cached"
    pool.check_integrity()


def test_allocation_counts_revived_and_spare_blocks() -> None:
    pool = BlockManager(4, 2)
    fill(pool, 0, [1, 2, 3, 4])
    pool.free(0)
    matched = pool.match_prefix(1, [1, 2, 3, 4, 5], None)
    assert pool.can_allocate(1, num_slots=8, prefix_block_ids=matched)
    assert not pool.can_allocate(1, num_slots=9, prefix_block_ids=matched)
    assert pool.can_allocate(1, num_slots=6, prefix_block_ids=matched, num_spare_blocks=1)
    assert not pool.can_allocate(1, num_slots=6, prefix_block_ids=matched, num_spare_blocks=2)
    assert pool.num_used_blocks == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockManager(4, 2, enable_prefix_caching=False)
    fill(pool, 0, [1, 2, 3, 4])
    assert pool.match_prefix(1, [1, 2, 3, 4], None) == []
    pool.free(0)
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 4)
    pool.check_integrity()


def test_integrity_names_what_is_wrong() -> None:
    pool = BlockManager(4, 2)
    fill(pool, 0, [1, 2, 3])
    pool._blocks[0].ref_count = 2
    with pytest.raises(IntegrityError, match="block 0 counts 2 references, tables hold 1"):
        pool.check_integrity()
    pool._blocks[0].ref_count = 1
    pool._free.pop()
    with pytest.raises(IntegrityError, match=r"1 free \+ 0 cached \+ 2 used blocks are not 4"):
        pool.check_integrity()


def test_integrity_sees_a_broken_hash_map() -> None:
    pool = BlockManager(4, 2)
    fill(pool, 0, [1, 2])
    pool._blocks[0].block_hash = b"other"
    with pytest.raises(IntegrityError, match="names block 0, which has another hash"):
        pool.check_integrity()
    pool._block_by_hash.clear()
    with pytest.raises(IntegrityError, match="1 blocks have a hash, the map knows 0"):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """A pool against a reference that remembers, per block, the whole content it was last given.

    A match must be exactly the longest prefix whose blocks the reference finds by comparing contents one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockManager(6, 2, num_lookahead_tokens=1)
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str | None] = {}
        self.next_id = 0
        self.published: dict[int, tuple[str | None, tuple[int, ...]]] = {}  # block -> certified content

    def expected_match(self, tokens: list[int], salt: str | None) -> list[int]:
        matched: list[int] = []
        while (end := 2 * len(matched) + 3) <= len(tokens):
            content = (salt, tuple(tokens[:end]))
            found = [block for block, known in self.published.items() if known == content]
            assert len(found) <= 1
            if not found:
                break
            matched += found
        return matched

    @precondition(lambda self: len(self.tokens) < 4)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), salt=st.sampled_from([None, "a"]))
    def start(self, tokens: list[int], salt: str | None) -> None:
        seq_id, self.next_id = self.next_id, self.next_id + 1
        matched = self.pool.match_prefix(seq_id, tokens, salt)
        assert matched == self.expected_match(tokens, salt)
        if not self.pool.can_allocate(seq_id, num_slots=len(tokens), prefix_block_ids=matched):
            self.pool.free(seq_id)
            return
        self.pool.allocate(seq_id, num_slots=len(tokens), prefix_block_ids=matched)
        for block in self.pool.block_table(seq_id)[len(matched) :]:
            self.published.pop(block, None)
        self.tokens[seq_id], self.salts[seq_id] = list(tokens), salt

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        num_slots = len(self.tokens[seq_id]) + 1
        if self.pool.can_allocate(seq_id, num_slots=num_slots):
            held = self.pool.block_table(seq_id)
            self.pool.allocate(seq_id, num_slots=num_slots)
            for block in self.pool.block_table(seq_id)[len(held) :]:
                self.published.pop(block, None)
            self.tokens[seq_id].append(token)

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens, salt = self.tokens[seq_id], self.salts[seq_id]
        num_computed = data.draw(st.integers(0, len(tokens)))
        self.pool.publish(seq_id, tokens, salt, num_computed_tokens=num_computed)
        for index, block in enumerate(self.pool.block_table(seq_id)):
            content = (salt, tuple(tokens[: 2 * index + 3]))
            is_certified = 2 * index + 2 <= num_computed and 2 * index + 3 <= len(tokens)
            if is_certified and content not in self.published.values():
                self.published[block] = content

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.pool.free(seq_id)
        del self.tokens[seq_id], self.salts[seq_id]

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()
        held = {block for seq_id in self.tokens for block in self.pool.block_table(seq_id)}
        assert self.pool.num_used_blocks == len(held)
        assert self.pool.num_cached_blocks == len(set(self.published) - held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(1, 5), st.integers(0, 20))
def test_blocks_cover_slots(block_size: int, num_slots: int) -> None:
    num_blocks = BlockManager(1, block_size).num_blocks_for(num_slots)
    assert (num_blocks - 1) * block_size < num_slots <= num_blocks * block_size
