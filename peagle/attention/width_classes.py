"""Which sequences share a grid of rows, where their numbers of rows differ.

A grid is as wide as its widest sequence, and every padded row goes through all layers; a grid of its own costs an
attention call in each layer. Owns the trade between them. Refuses to know what the rows hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

# Rows that another grid is worth. Measured (docs/log.md, 2026-12-05): a grid costs a step of the default model as much
# as one to two rows do, on a CPU.
ROWS_PER_GRID = 2


def width_classes(widths: Sequence[int], *, rows_per_grid: int = ROWS_PER_GRID) -> list[list[int]]:
    """Split sequences into grids so that padded rows, and `rows_per_grid` for each grid, are fewest.

    Args:
        widths: rows of each sequence, at least 1.
        rows_per_grid: rows that cost as much as another grid.

    Returns:
        Indices into `widths` for each grid, the widest grid first; within one they ascend. Empty without sequences.
    """
    order = sorted(range(len(widths)), key=lambda index: (-widths[index], index))
    runs = [list(members) for _, members in groupby(order, key=widths.__getitem__)]
    # cheapest[i]: least cost of the runs from i on, and, negated, where the grid that begins at i ends: of equals, one
    # grid is better than two.
    cheapest = [(0, 0)] * (len(runs) + 1)
    for first in reversed(range(len(runs))):
        width, num_seqs, options = widths[runs[first][0]], 0, []
        for end in range(first + 1, len(runs) + 1):
            num_seqs += len(runs[end - 1])
            options.append((width * num_seqs + rows_per_grid + cheapest[end][0], -end))
        cheapest[first] = min(options)
    grids, first = [], 0
    while first < len(runs):
        end = -cheapest[first][1]
        grids.append(sorted(index for run in runs[first:end] for index in run))
        first = end
    return grids
