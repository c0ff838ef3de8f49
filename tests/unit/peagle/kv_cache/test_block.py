from __future__ import annotations

from peagle.kv_cache.block import Block, FreeBlocks


def test_empty_blocks_go_out_in_order_and_before_cached_ones() -> None:
    blocks = [Block(i) for i in range(4)]
    free = FreeBlocks(blocks)
    first = free.pop()
    first.block_hash = b"a"
    free.push(first)
    assert (len(free), free.num_cached) == (4, 1)
    assert [free.pop().block_id for _ in range(4)] == [1, 2, 3, 0]
    assert len(free) == 0


def test_cached_blocks_leave_in_the_order_of_release_unless_hit_again() -> None:
    free = FreeBlocks([])
    blocks = [Block(i, block_hash=bytes([i])) for i in range(4)]
    for block in blocks:
        free.push(block)
    free.remove(blocks[1])
    free.push(blocks[1])
    assert [block.block_id for block in free.cached_blocks] == [0, 2, 3, 1]
    assert [free.pop().block_id for _ in range(4)] == [0, 2, 3, 1]
