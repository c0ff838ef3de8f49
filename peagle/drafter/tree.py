"""The best tree of drafts that a parallel head can offer within a number of nodes.

The head gives one ranking of tokens for each depth, whatever was drafted before. So a node is a rank for each depth
down to its own, and it is reached with the product of their probabilities. The sum of these over all nodes is how many
drafts are accepted on average, if the probabilities are right; and the nodes with the largest products maximise it,
since they hold their parents, which are never less likely. Best-first search finds them in order: whoever is taken
offers its next sibling and its first child (DDTree, arXiv 2604.12989).

Owns the search. Refuses to know where scores come from (`tree_calibration`) and torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

ROOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Drafted tokens, the most promising node first: parents before children, siblings by rank.

    The first n nodes are the best tree of n nodes.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # index of the node before, -1 for the root: the last known token
    depths: tuple[int, ...]  # 1 for children of the root
    ranks: tuple[int, ...]  # place of the token in the ranking of its depth
    scores: tuple[float, ...]  # log-probability that the node is reached

    @property
    def num_nodes(self) -> int:
        """B, without the root."""
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> float:
        """Drafts that are accepted on average, if the scores are right."""
        return math.fsum(math.exp(score) for score in self.scores)

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


def best_first_tree(
    scores: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]], *, max_num_nodes: int
) -> DraftTree:
    """The tree of at most `max_num_nodes` nodes with the largest sum of path probabilities.

    O(B log B) for B nodes, besides the sorting of rankings that are not in order.

    Args:
        scores: log-probability of each candidate, given that its parent is accepted; [depth][rank], at most 0. Those
            that are -inf or NaN are left out.
        token_ids: of the candidates, [depth][rank]; those of one depth differ.
        max_num_nodes: the budget.
    """
    rankings = [_ranking(row) for row in scores]
    nodes: list[tuple[int, int, int, float]] = []  # parent, depth, rank, score
    # Offers, best first: score (negated), depth, place among the siblings, parent, parent's score. Ties go to the
    # shallower node, then to the more likely token.
    offers: list[tuple[float, int, int, int, float]] = []
    _offer(offers, rankings, scores, depth=0, place=0, parent=ROOT, above=0.0)
    while offers and len(nodes) < max_num_nodes:
        negated, depth, place, parent, above = heappop(offers)
        nodes.append((parent, depth + 1, rankings[depth][place], -negated))
        _offer(offers, rankings, scores, depth=depth, place=place + 1, parent=parent, above=above)
        _offer(offers, rankings, scores, depth=depth + 1, place=0, parent=len(nodes) - 1, above=-negated)
    return DraftTree(
        token_ids=tuple(token_ids[depth - 1][rank] for _, depth, rank, _ in nodes),
        parents=tuple(parent for parent, _, _, _ in nodes),
        depths=tuple(depth for _, depth, _, _ in nodes),
        ranks=tuple(rank for _, _, rank, _ in nodes),
        scores=tuple(score for _, _, _, score in nodes),
    )


def _ranking(scores: Sequence[float]) -> list[int]:
    """Ranks worth drafting, the most likely first. A calibrated table need not be in order."""
    possible = [rank for rank, score in enumerate(scores) if score > -math.inf]  # false for NaN
    assert all(scores[rank] <= 0.0 for rank in possible), "scores are logarithms of probabilities"
    return sorted(possible, key=lambda rank: -scores[rank])


def _offer(
    offers: list[tuple[float, int, int, int, float]],
    rankings: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    *,
    depth: int,
    place: int,
    parent: int,
    above: float,
) -> None:
    """Put a node on the heap, if there is such a candidate."""
    if depth == len(rankings) or place == len(rankings[depth]):
        return
    score = above + scores[depth][rankings[depth][place]]
    heappush(offers, (-score, depth, place, parent, above))
