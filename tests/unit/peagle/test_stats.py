"""Counters: buckets, sums, and snapshots that nobody changes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.stats import EngineStats, GraphStats, Histogram, SpecDecodeStats, StepStats, one_two_five

BOUNDS = (0.1, 1.0, 10.0)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), max_size=30))
def test_a_histogram_counts_every_value_in_the_first_bucket_that_holds_it(values: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for value, times in values:
        histogram.observe(value, times=times)
    every = [value for value, times in values for _ in range(times)]
    for index, bound in enumerate(BOUNDS):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in every)
    assert histogram.num_observed == len(every)
    assert histogram.total == pytest.approx(sum(every))
    assert all(histogram.counts[bisect_left(BOUNDS, value)] > 0 for value in every)


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, (1,)), (4, (1, 2)), (5, (1, 2, 5)), (100, (1, 2, 5, 10, 20, 50, 100))]
)
def test_sizes_stop_at_the_largest(largest: int, sizes: tuple[int, ...]) -> None:
    assert one_two_five(largest) == sizes


def test_a_tree_is_counted_by_depth() -> None:
    stats = SpecDecodeStats.for_depth(3)
    # 0 and 1 are roots, 2 hangs on 1, 3 on 2
    stats.observe(num_draft_tokens=4, num_accepted_tokens=2, draft_parents=[-1, -1, 1, 2])
    assert stats.num_draft_tokens_per_pos == [2, 1, 1]
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]
    stats.observe(num_draft_tokens=2, num_accepted_tokens=0)  # a chain
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 6, 2)
    assert stats.num_draft_tokens_per_pos == [3, 2, 1]


def test_a_step_without_drafts_is_no_proposal() -> None:
    stats = SpecDecodeStats.for_depth(2)
    stats.observe(num_draft_tokens=0, num_accepted_tokens=0)
    assert stats == SpecDecodeStats.for_depth(2)


def change_everything(stats: EngineStats) -> None:
    """Write into every part, at least once."""
    stats.num_running += 1
    stats.prefix_cache.hits += 1
    stats.requests_by_reason["stop"] = stats.requests_by_reason.get("stop", 0) + 1
    stats.graphs["target"].hits += 1
    stats.spec_decode.observe(num_draft_tokens=2, num_accepted_tokens=1)
    groups = (stats, stats.steps, stats.requests)
    parts = [getattr(group, field.name) for group in groups for field in fields(group)]
    for histogram in (part for part in parts if isinstance(part, Histogram)):
        histogram.observe(1.0)


def test_a_snapshot_stays_as_it_was() -> None:
    stats = EngineStats(
        graphs={"target": GraphStats()}, spec_decode=SpecDecodeStats.for_depth(2), steps=StepStats.for_depth(2)
    )
    snapshot, reference = stats.copy(), repr(stats)
    change_everything(stats)
    assert repr(snapshot) == reference
    assert repr(stats) != reference
    again = stats.copy()
    stats.graphs["target"].reset()
    assert again.graphs["target"].hits == 1
