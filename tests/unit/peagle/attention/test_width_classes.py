"""Sequences share grids as cheaply as any split of them would."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.attention.width_classes import width_classes


def cost(widths: list[int], grids: list[list[int]], rows_per_grid: int) -> int:
    return sum(max(widths[index] for index in grid) * len(grid) + rows_per_grid for grid in grids)


def every_split(widths: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put sequences into at most three grids."""
    for places in product(range(3), repeat=len(widths)):
        yield [[index for index, place in enumerate(places) if place == grid] for grid in range(3) if grid in places]


@given(widths=st.lists(st.integers(1, 9), max_size=12), rows_per_grid=st.integers(0, 9))
def test_every_sequence_is_in_one_grid(widths: list[int], rows_per_grid: int) -> None:
    grids = width_classes(widths, rows_per_grid=rows_per_grid)
    assert sorted(index for grid in grids for index in grid) == list(range(len(widths)))
    widest = [max(widths[index] for index in grid) for grid in grids]
    assert widest == sorted(widest, reverse=True)
    assert all(grid == sorted(grid) for grid in grids)


@given(widths=st.lists(st.integers(1, 9), min_size=1, max_size=6), rows_per_grid=st.integers(0, 9))
def test_no_split_is_cheaper(widths: list[int], rows_per_grid: int) -> None:
    least = min(cost(widths, split, rows_per_grid) for split in every_split(widths))
    assert cost(widths, width_classes(widths, rows_per_grid=rows_per_grid), rows_per_grid) <= least


@pytest.mark.parametrize(
    ("widths", "grids"),
    [
        ([], []),
        ([1, 1, 1], [[0, 1, 2]]),
        ([1, 4, 1, 1], [[1], [0, 2, 3]]),  # nine padded rows
        ([1, 2], [[0, 1]]),  # one padded row
        ([400, 3, 1, 3], [[0], [1, 2, 3]]),
    ],
)
def test_examples(widths: list[int], grids: list[list[int]]) -> None:
    assert width_classes(widths, rows_per_grid=2) == grids
