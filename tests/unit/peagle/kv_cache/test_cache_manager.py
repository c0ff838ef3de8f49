from __future__ import annotations

import pytest

from peagle.errors import ConfigError, IntegrityError
from peagle.kv_cache import BlockManager, KVCacheManager, PrefixMatch
from peagle.sequence import Sequence
from tests.builders.scheduler import make_kv, make_sequence


def compute(kv: KVCacheManager, seq: Sequence, num_computed: int | None = None) -> None:
    """Allocate and publish as if `seq` had computed `num_computed` tokens (default: all but the newest)."""
    assert kv.allocate_slots(seq, num_new_tokens=seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens - 1 if num_computed is None else num_computed
    kv.publish(seq)


@pytest.mark.parametrize("has_drafter", [True, False])
@pytest.mark.parametrize(("num_shared", "num_hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (14, 8)])
def test_at_least_one_token_is_left_to_compute(has_drafter: bool, num_shared: int, num_hit: int) -> None:
    kv = make_kv(has_drafter=has_drafter)
    compute(kv, make_sequence(0, range(12)))
    match = kv.match_prefix(make_sequence(1, range(num_shared)))
    assert match.num_tokens == num_hit
    assert len(match.target_block_ids) == num_hit // 4


def test_a_block_whose_next_token_differs_hits_only_without_a_drafter() -> None:
    prompt = [0, 1, 2, 3, 99, 98]
    for has_drafter, num_hit in ((True, 0), (False, 4)):
        kv = make_kv(has_drafter=has_drafter)
        compute(kv, make_sequence(0, range(12)))
        assert kv.match_prefix(make_sequence(1, prompt)).num_tokens == num_hit


def test_a_hit_is_as_long_as_both_pools_have_it() -> None:
    target, drafter = BlockManager(16, 4), BlockManager(16, 4, num_lookahead_tokens=1)
    kv = KVCacheManager(target, drafter)
    compute(kv, make_sequence(0, range(13)))
    kv.free(0)
    drafter.allocate(7, num_slots=14 * 4)  # evicts the tail of the cached blocks
    match = kv.match_prefix(make_sequence(1, range(13)))
    assert (match.num_tokens, len(match.target_block_ids), len(match.drafter_block_ids)) == (8, 2, 2)


@pytest.mark.parametrize(("num_target", "num_drafter"), [(2, 9), (9, 2)])
def test_allocation_is_all_or_nothing(num_target: int, num_drafter: int) -> None:
    kv = make_kv(num_blocks=num_target, num_drafter_blocks=num_drafter)
    seq = make_sequence(0, range(9))
    assert not kv.allocate_slots(seq, num_new_tokens=9)
    assert (kv.num_used_blocks, kv.seq_ids) == (0, frozenset())
    assert kv.allocate_slots(seq, num_new_tokens=8)
    seq.num_computed_tokens = 8
    assert not kv.allocate_slots(seq, num_new_tokens=1)
    assert len(kv.block_table(0)) == len(kv.drafter_block_table(0)) == 2
    assert kv.max_num_slots == 8


def test_lookahead_slots_are_the_drafters_alone() -> None:
    kv = make_kv()
    assert kv.allocate_slots(make_sequence(0, range(4)), num_new_tokens=4, num_lookahead_slots=2)
    assert (len(kv.block_table(0)), len(kv.drafter_block_table(0))) == (1, 2)


def test_usage_is_that_of_the_fuller_pool() -> None:
    kv = make_kv(num_blocks=10, num_drafter_blocks=4)
    kv.allocate_slots(make_sequence(0, range(4)), num_new_tokens=4)
    assert kv.usage == 0.25


def test_the_last_token_of_an_ended_answer_certifies_no_drafter_block() -> None:
    kv = make_kv()
    ended = make_sequence(0, range(8))
    compute(kv, ended, num_computed=8)  # an answer that was cut inside its accepted drafts
    kv.free(0)
    match = kv.match_prefix(make_sequence(1, [*range(8), 50, 51]))
    assert match.num_tokens == 4, "the drafter's slot 7 was computed with a token that was cut away"


def test_lookups_count_tokens() -> None:
    kv = make_kv()
    kv.count_lookup(make_sequence(0, range(9)), PrefixMatch(num_tokens=8))
    assert (kv.prefix_stats.queries, kv.prefix_stats.hits) == (9, 8)
    off = make_kv(enable_prefix_caching=False)
    off.count_lookup(make_sequence(0, range(9)), PrefixMatch())
    assert off.prefix_stats.queries == 0


def test_pools_must_fit_together() -> None:
    with pytest.raises(ConfigError, match="same block size, got 4 and 8"):
        KVCacheManager(BlockManager(4, 4), BlockManager(4, 8, num_lookahead_tokens=1))
    with pytest.raises(ConfigError, match="num_lookahead_tokens=1"):
        KVCacheManager(BlockManager(4, 4), BlockManager(4, 4))


def test_integrity_sees_pools_that_disagree() -> None:
    target, drafter = BlockManager(4, 4), BlockManager(4, 4, num_lookahead_tokens=1)
    kv = KVCacheManager(target, drafter)
    kv.allocate_slots(make_sequence(0), num_new_tokens=3)
    target.free(0)
    with pytest.raises(IntegrityError, match="holds sequences that the target's does not"):
        kv.check_integrity()
