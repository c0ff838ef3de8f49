"""The best tree of drafts by writing down every node there could be. Slow on purpose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def all_paths(scores: Sequence[Sequence[float]]) -> dict[tuple[int, ...], float]:
    """Every node as the ranks on its path, with the log-probability that it is reached."""
    paths = {}
    for depth in range(1, len(scores) + 1):
        for ranks in itertools.product(*[range(len(row)) for row in scores[:depth]]):
            total = 0.0
            for row, rank in zip(scores, ranks, strict=False):
                total += row[rank]
            paths[ranks] = total
    return paths


def reference_tree(scores: Sequence[Sequence[float]], *, max_num_nodes: int) -> dict[tuple[int, ...], float]:
    """The nodes most likely to be reached, shallower ones first on ties."""
    paths = all_paths(scores)
    best = sorted(paths, key=lambda ranks: (-paths[ranks], len(ranks)))
    return {ranks: paths[ranks] for ranks in best[:max_num_nodes]}
