"""Masks against the rule they stand for: a row at p sees the keys j <= p, and j > p - w in a window w."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.attention.metadata import AttentionMetadata, QueryGroup


def make_group(positions: list[list[int]], *, num_blocks: int, block_size: int = 4) -> QueryGroup:
    return QueryGroup(
        first_row=0,
        positions=torch.tensor(positions),
        block_tables=torch.zeros(len(positions), num_blocks, dtype=torch.int64),
        block_size=block_size,
        dtype=torch.float64,
    )


@given(
    positions=st.lists(st.lists(st.integers(0, 11), min_size=3, max_size=3), min_size=1, max_size=4),
    sliding_window=st.none() | st.integers(1, 14),
)
@settings(deadline=None)
def test_mask_follows_the_rule(positions: list[list[int]], sliding_window: int | None) -> None:
    mask = make_group(positions, num_blocks=3).mask(sliding_window)
    assert mask.shape == (len(positions), 1, 3, 12)
    for seq, row_positions in enumerate(positions):
        for row, position in enumerate(row_positions):
            first = 0 if sliding_window is None else position - sliding_window + 1
            expected = [0.0 if first <= key <= position else float("-inf") for key in range(12)]
            assert mask[seq, 0, row].tolist() == expected


def test_masks_are_built_once_for_each_window() -> None:
    group = make_group([[0, 1], [5, 6]], num_blocks=2)
    assert group.mask(None) is group.mask(None)
    assert group.mask(2) is group.mask(2)
    assert not torch.equal(group.mask(2), group.mask(None))


def test_sizes() -> None:
    group = make_group([[0, 1, 2], [5, 6, 7]], num_blocks=2)
    metadata = AttentionMetadata(slot_mapping=torch.zeros(6, dtype=torch.int64), groups=(group,))
    assert (group.num_seqs, group.width, group.num_rows, group.num_keys) == (2, 3, 6, 8)
    assert metadata.num_rows == 6
