from __future__ import annotations

import pytest

from peagle.scheduler.head_gain import HeadGain
from peagle.scheduler.step_costs import CostCurve


def linear(fixed_s: float, row_s: float) -> CostCurve:
    costs = CostCurve()
    for num_rows in (1, 64):
        costs.observe(num_rows, fixed_s + row_s * num_rows)
    return costs


def test_nothing_is_said_before_enough_was_seen() -> None:
    gain = HeadGain(linear(1.0, 0.0), CostCurve())
    for _ in range(127):
        gain.observe([0.5])
    assert gain.at(1) == float("inf")
    gain.observe([0.5])
    assert gain.at(1) == pytest.approx(1.5)


def test_without_costs_nothing_speaks_against_the_head() -> None:
    gain = HeadGain(CostCurve(), CostCurve())
    for _ in range(200):
        gain.observe([0.0])
    assert gain.at(4) == float("inf")


def test_it_is_the_ratio_of_tokens_a_second() -> None:
    gain = HeadGain(linear(10.0, 1.0), linear(2.0, 0.0))
    for _ in range(200):
        gain.observe([0.8, 0.6, 0.001])
    # One sequence: 2.4 tokens in 10 + 3 rows + 2; without the head one in 11.
    assert gain.at(1) == pytest.approx(2.4 / 15 * 11)
    # Four: 9.6 tokens in 10 + 12 + 2; without the head 4 in 14.
    assert gain.at(4) == pytest.approx(9.6 / 24 * 14 / 4)
    assert gain.at(60) < 1.0


def test_the_estimate_follows_the_last_proposals() -> None:
    gain = HeadGain(linear(1.0, 0.0), CostCurve())
    for _ in range(1100):
        gain.observe([1.0])
    assert gain.at(1) == pytest.approx(2.0)
    for _ in range(1100):
        gain.observe([0.0])
    assert gain.at(1) == pytest.approx(1.0)


def test_proposals_of_different_answers_meet_in_one_step() -> None:
    gain = HeadGain(linear(10.0, 1.0), CostCurve())
    for index in range(256):
        gain.observe([1.0] if index < 128 else [0.0])
    # Each step of two has one good and one bad chain: 3 tokens in 13, against 2 in 12.
    assert gain.at(2) == pytest.approx(3 / 13 * 12 / 2)


def test_what_is_expected_counts_from_the_start_and_less_and_less() -> None:
    gain = HeadGain(linear(1.0, 0.0), CostCurve(), [0.5, 0.25])
    assert gain.at(1) == pytest.approx(1.75)
    for _ in range(2000):
        gain.observe([0.0])
    assert gain.at(1) == pytest.approx(1.0)
