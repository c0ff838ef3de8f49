"""Buckets at their edges, and spans against the definition of what a span costs."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.cuda_graphs.buckets import Buckets, GridShape, Span, split_spans


@given(largest=st.integers(1, 300), data=st.data())
@settings(deadline=None)
def test_rounding_up_takes_the_smallest_size_that_holds(largest: int, data: st.DataObject) -> None:
    buckets = data.draw(st.sampled_from([Buckets.every(largest), Buckets.doubling(largest)]))
    assert buckets.sizes[-1] == largest
    assert list(buckets.sizes) == sorted(set(buckets.sizes))
    value = data.draw(st.integers(1, largest))
    assert buckets.round_up(value) == min(size for size in buckets.sizes if size >= value)


def test_every_size_pads_nothing() -> None:
    assert [Buckets.every(5).round_up(value) for value in range(1, 6)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_doubling_ends_with_the_largest(largest: int, sizes: tuple[int, ...]) -> None:
    assert Buckets.doubling(largest).sizes == sizes


def test_beyond_the_largest_is_an_error() -> None:
    with pytest.raises(ValueError, match="9 is beyond the largest bucket 8"):
        Buckets.doubling(8).round_up(9)


def test_grid_counts_padding() -> None:
    shape = GridShape(3, (Span(2, 5), Span(4, 1)))
    assert (shape.num_seqs, shape.num_rows) == (6, 18)


def gathered(spans: tuple[Span, ...]) -> int:
    return sum(span.num_seqs * span.num_blocks for span in spans)


def brute_force(block_counts: list[int], span_cost: int) -> int:
    """Blocks and span costs of the best of all tilings."""
    num_seqs = len(block_counts)
    costs = []
    for num_cuts in range(num_seqs):
        for cuts in combinations(range(1, num_seqs), num_cuts):
            edges = [0, *cuts, num_seqs]
            spans = [(last - first) * block_counts[first] for first, last in pairwise(edges)]
            costs.append(sum(spans) + span_cost * num_cuts)
    return min(costs)


counts = st.lists(st.integers(1, 300), min_size=1, max_size=8).map(lambda values: sorted(values, reverse=True))


@given(block_counts=counts, span_cost=st.integers(1, 100))
@settings(deadline=None)
def test_spans_tile_the_sequences_and_hold_each(block_counts: list[int], span_cost: int) -> None:
    spans = split_spans(block_counts, min_saved_blocks=span_cost)
    first = 0
    for span in spans:
        assert span.num_seqs > 0
        assert span.num_blocks == max(block_counts[first : first + span.num_seqs])
        first += span.num_seqs
    assert first == len(block_counts)


@given(block_counts=counts, span_cost=st.integers(1, 100))
@settings(deadline=None)
def test_splitting_pays(block_counts: list[int], span_cost: int) -> None:
    """Not always the best tiling, but never worse than none, and no span is left that one more cut would improve."""
    spans = split_spans(block_counts, min_saved_blocks=span_cost)
    cost = gathered(spans) + span_cost * (len(spans) - 1)
    assert brute_force(block_counts, span_cost) <= cost <= len(block_counts) * block_counts[0]
    first = 0
    for span in spans:
        inside = block_counts[first : first + span.num_seqs]
        for cut in range(1, span.num_seqs):
            assert (inside[0] - inside[cut]) * (span.num_seqs - cut) < span_cost
        first += span.num_seqs


def test_equal_lengths_share_a_span() -> None:
    assert split_spans([7] * 20, min_saved_blocks=1) == (Span(20, 7),)


def test_a_long_sequence_stands_alone() -> None:
    assert split_spans([500, 3, 3, 2], min_saved_blocks=64) == (Span(1, 500), Span(3, 3))
