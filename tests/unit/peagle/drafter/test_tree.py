"""The best tree against writing down every tree there is."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.drafter.tree import ROOT, DraftTree, best_first_tree
from peagle.drafter.tree_reference import all_paths, reference_tree

log_probs = st.floats(-5.0, 0.0) | st.sampled_from([-1.0, -0.5, 0.0])


def tables(*, max_depth: int, max_rank: int) -> st.SearchStrategy[list[list[float]]]:
    """Scores [depth][rank], in no order, the depths not equally wide."""
    return st.lists(st.lists(log_probs, min_size=1, max_size=max_rank), min_size=1, max_size=max_depth)


def tokens_for(scores: list[list[float]]) -> list[list[int]]:
    """Token ids that tell depth and rank."""
    return [[100 * (depth + 1) + rank for rank in range(len(row))] for depth, row in enumerate(scores)]


def build(scores: list[list[float]], max_num_nodes: int) -> DraftTree:
    return best_first_tree(scores, tokens_for(scores), max_num_nodes=max_num_nodes)


def ranks_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.ranks[above] for above in tree.path(node))


@given(scores=tables(max_depth=4, max_rank=4), max_num_nodes=st.integers(0, 40))
@settings(deadline=None, max_examples=200)
def test_equals_the_reference(scores: list[list[float]], max_num_nodes: int) -> None:
    tree = build(scores, max_num_nodes)
    wanted = reference_tree(scores, max_num_nodes=max_num_nodes)
    assert list(tree.scores) == sorted(wanted.values(), reverse=True)
    found = {ranks_of(tree, node) for node in range(tree.num_nodes)}
    assert len(found) == tree.num_nodes, "no node twice"
    paths = all_paths(scores)
    assert all(paths[ranks_of(tree, node)] == tree.scores[node] for node in range(tree.num_nodes))
    least = min(wanted.values(), default=0.0)
    assert {ranks for ranks, score in wanted.items() if score > least} <= found, "they differ in ties at most"


@given(scores=tables(max_depth=4, max_rank=4), max_num_nodes=st.integers(1, 30))
@settings(deadline=None)
def test_order_and_links(scores: list[list[float]], max_num_nodes: int) -> None:
    tree = build(scores, max_num_nodes)
    assert tree.num_nodes == min(max_num_nodes, len(all_paths(scores)))
    last_sibling: dict[int, float] = {}
    for node, parent in enumerate(tree.parents):
        assert parent < node, "parents come first"
        assert tree.depths[node] == (1 if parent == ROOT else tree.depths[parent] + 1) <= len(scores)
        own = scores[tree.depths[node] - 1][tree.ranks[node]]
        assert own <= last_sibling.get(parent, 0.0), "siblings by rank"
        last_sibling[parent] = own
        assert tree.token_ids[node] == 100 * tree.depths[node] + tree.ranks[node]
        assert tree.path(node)[-1] == node
        assert [tree.depths[above] for above in tree.path(node)] == list(range(1, tree.depths[node] + 1))
    smaller = build(scores, max_num_nodes - 1)
    assert tree.token_ids[: smaller.num_nodes] == smaller.token_ids, "a smaller budget gives a prefix"
    assert tree.parents[: smaller.num_nodes] == smaller.parents


@given(scores=tables(max_depth=2, max_rank=3), max_num_nodes=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_no_other_tree_accepts_more(scores: list[list[float]], max_num_nodes: int) -> None:
    paths = all_paths(scores)
    best = 0.0
    for num in range(max_num_nodes + 1):
        for nodes in itertools.combinations(paths, num):
            if all(len(ranks) == 1 or ranks[:-1] in nodes for ranks in nodes):
                best = max(best, math.fsum(math.exp(paths[ranks]) for ranks in nodes))
    assert build(scores, max_num_nodes).num_expected_tokens == pytest.approx(best, rel=1e-12)


def test_candidates_without_probability_are_left_out() -> None:
    tree = build([[-math.inf, -1.0, math.nan], [-0.1, -math.inf]], 10)
    assert tree.token_ids == (101, 200)
    assert build([[-math.inf], [-0.1]], 10).num_nodes == 0
    assert build([], 10).num_nodes == 0


def test_sure_drafts_make_a_chain_and_doubtful_ones_a_bush() -> None:
    sure = build([[math.log(0.9), math.log(0.05)]] * 4, 4)
    assert sure.parents == (-1, 0, 1, 2)
    doubtful = build([[math.log(0.3), math.log(0.25), math.log(0.2), math.log(0.15)]] * 4, 4)
    assert doubtful.parents == (-1, -1, -1, -1)


def test_scores_are_probabilities() -> None:
    with pytest.raises(AssertionError, match="logarithms"):
        build([[0.5]], 1)
