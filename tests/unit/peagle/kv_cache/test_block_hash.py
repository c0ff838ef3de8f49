from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peagle.kv_cache.block_hash import HashChain, hash_block, root_hash

TOKENS = st.lists(st.integers(0, 3), max_size=14)
LOOKAHEAD = st.integers(0, 1)
SALT = st.sampled_from([None, "", "a", "\ud800"])


def chain_hashes(tokens: list[int], *, lookahead: int, salt: str | None, block_size: int = 3) -> list[bytes]:
    chain = HashChain(block_size=block_size, num_lookahead_tokens=lookahead, salt=salt)
    return list(chain.hashes(tokens))


@given(TOKENS, TOKENS, LOOKAHEAD, SALT, SALT)
def test_hashes_agree_exactly_where_the_certified_content_agrees(
    left: list[int], right: list[int], lookahead: int, left_salt: str | None, right_salt: str | None
) -> None:
    pairs = zip(
        chain_hashes(left, lookahead=lookahead, salt=left_salt),
        chain_hashes(right, lookahead=lookahead, salt=right_salt),
        strict=False,
    )
    for index, (left_hash, right_hash) in enumerate(pairs):
        end = (index + 1) * 3 + lookahead
        is_same_content = left[:end] == right[:end] and left_salt == right_salt
        assert (left_hash == right_hash) == is_same_content


@given(TOKENS, LOOKAHEAD)
def test_only_full_blocks_with_their_lookahead_are_certified(tokens: list[int], lookahead: int) -> None:
    num_hashes = len(chain_hashes(tokens, lookahead=lookahead, salt=None))
    assert num_hashes == sum((i + 1) * 3 + lookahead <= len(tokens) for i in range(len(tokens)))


@given(TOKENS, LOOKAHEAD, st.integers(0, 14))
def test_a_growing_sequence_gets_the_hashes_of_the_whole(tokens: list[int], lookahead: int, cut: int) -> None:
    chain = HashChain(block_size=3, num_lookahead_tokens=lookahead, salt="s")
    chain.hashes(tokens[:cut])
    assert chain.hashes(tokens) == chain_hashes(tokens, lookahead=lookahead, salt="s")


def test_hashes_do_not_depend_on_the_process() -> None:
    digest = hash_block(root_hash(None), [1, 2, 3])
    assert len(digest) == 32
    assert digest.hex() == "6941f3ed7ee6333d80c06e612731c49bcccb4a96ef2b9c872632dd7898724222"
