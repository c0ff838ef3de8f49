"""Metrics against values worked out by hand."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.benchmark.metrics import (
    Distribution,
    Failure,
    FailureKind,
    RequestRecord,
    Round,
    compare,
    percentile,
    summarize,
)

FAILED = RequestRecord(
    started_s=0.0, finished_s=9.0, failure=Failure(FailureKind.TIMEOUT, "slow"), completion_tokens=50
)


def record(*chunk_times_s: float, tokens: int, started_s: float = 0.0, text: str = "x") -> RequestRecord:
    return RequestRecord(
        started_s=started_s,
        finished_s=chunk_times_s[-1] + 0.5,
        chunk_times_s=chunk_times_s,
        prompt_tokens=10,
        completion_tokens=tokens,
        finish_reason="stop",
        text=text,
    )


def test_tpot_comes_from_usage_and_not_from_chunks() -> None:
    bunched = record(1.25, 1.5, 2.25, tokens=9, started_s=1.0)  # 3 chunks, 9 tokens
    assert bunched.ttft_s == 0.25
    assert bunched.inter_chunk_s == [0.25, 0.75]
    assert bunched.tpot_s == 1.0 / 8
    assert bunched.e2e_s == 1.75


def test_a_single_token_has_no_tpot() -> None:
    assert record(1.0, tokens=1).tpot_s is None
    assert record(1.0, tokens=2).tpot_s == 0.0  # both in one chunk: no time between them was seen


def test_percentiles_of_one_to_eleven() -> None:
    values = [float(value) for value in range(1, 12)]
    assert percentile(values, 50) == 6.0
    assert percentile(values, 90) == 10.0
    assert percentile(values, 99) == pytest.approx(10.9)
    assert percentile([4.0], 99) == 4.0
    assert percentile([1.0, 2.0], 50) == 1.5


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    ordered = sorted(values)
    hundredths = statistics.quantiles(ordered, n=100, method="inclusive")
    for percent in (50, 90, 99):
        assert percentile(ordered, percent) == pytest.approx(hundredths[percent - 1])


def test_distribution() -> None:
    assert Distribution.of([]) is None
    assert Distribution.of([3.0, 1.0, 2.0, 6.0, 5.0]) == Distribution(
        count=5, mean=3.4, min=1.0, p50=3.0, p90=5.6, p99=5.96, max=6.0
    )


def test_summary_pools_rounds_and_leaves_failures_out() -> None:
    first = Round(records=(record(1.0, 2.0, tokens=5), FAILED), warm_up=(FAILED,), wall_s=10.0, client_cpu_s=1.0)
    second = Round(records=(record(3.0, 4.0, tokens=15), record(2.0, tokens=1)), wall_s=30.0, client_cpu_s=1.0)
    summary = summarize([first, second])
    assert (summary.num_requests, summary.num_failed, summary.num_warm_up_failed) == (4, 1, 1)
    assert summary.completion_tokens == 21
    assert summary.prompt_tokens == 30
    assert summary.tokens_per_s == 21 / 40
    assert summary.tokens_per_s_by_round == [0.5, 16 / 30]
    assert summary.requests_per_s == 3 / 40
    assert summary.tokens_per_chunk == 21 / 5
    assert summary.client_cpu_share == 2 / 40
    assert summary.finish_reasons == {"stop": 3}
    assert summary.ttft_s is not None
    assert summary.ttft_s.p50 == 2.0
    assert summary.tpot_s is not None
    assert summary.tpot_s.count == 2  # the single token has none
    assert summary.output_tokens is not None
    assert (summary.output_tokens.min, summary.output_tokens.max) == (1, 15)
    assert [failure.kind for failure in first.failures] == [FailureKind.TIMEOUT] * 2


def test_summary_of_nothing_answered() -> None:
    summary = summarize([Round(records=(FAILED,), wall_s=2.0)])
    assert summary.tokens_per_s == 0.0
    assert summary.ttft_s is None
    assert summary.tokens_per_chunk is None


def test_comparison_is_a_over_b() -> None:
    mine = [
        Round(records=(record(1.0, 2.0, tokens=5), record(1.0, 2.0, tokens=5, text="mine")), wall_s=1.0),
        Round(records=(record(1.0, 2.0, tokens=5), FAILED), wall_s=1.0),
    ]
    other = [
        Round(records=(record(2.0, 4.0, tokens=5), record(2.0, 4.0, tokens=5)), wall_s=2.0),
        Round(records=(record(2.0, 4.0, tokens=5), record(2.0, 4.0, tokens=5)), wall_s=4.0),
    ]
    comparison = compare(mine, other, concurrency=4)
    assert comparison.tokens_per_s_ratio == (15 / 2) / (20 / 6)
    assert comparison.tokens_per_s_ratio_by_round == [2.0, 2.0]
    assert comparison.ttft_p50_ratio == 0.5
    assert comparison.tpot_p50_ratio == 0.5
    assert comparison.e2e_p50_ratio == 2.5 / 4.5
    assert (comparison.num_equal_outputs, comparison.num_compared_outputs) == (2, 3)


def test_no_ratio_to_a_server_that_answered_nothing() -> None:
    comparison = compare(
        [Round(records=(record(1.0, 2.0, tokens=5),), wall_s=1.0)],
        [Round(records=(FAILED,), wall_s=1.0)],
        concurrency=1,
    )
    assert comparison.tokens_per_s_ratio is None
    assert comparison.ttft_p50_ratio is None
    assert comparison.num_compared_outputs == 0


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20), st.integers(2, 100))
def test_tpot_spreads_the_gaps_over_the_tokens(times: list[float], tokens: int) -> None:
    seen = record(*sorted(times), tokens=tokens)
    assert seen.tpot_s is not None
    assert seen.tpot_s * (tokens - 1) == pytest.approx(
        sum(later - earlier for earlier, later in pairwise(sorted(times)))
    )
