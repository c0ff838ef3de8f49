from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.scheduler.step_costs import CostCurve


def curve(*points: tuple[int, float]) -> CostCurve:
    costs = CostCurve()
    for num_rows, seconds in points:
        costs.observe(num_rows, seconds)
    return costs


def test_nothing_is_known_before_a_measurement() -> None:
    assert not CostCurve().is_known
    assert CostCurve().seconds(5) == 0.0


def test_between_points_it_is_a_line_and_beyond_them_it_goes_on() -> None:
    costs = curve((1, 1.0), (5, 3.0))
    assert costs.is_known
    assert [costs.seconds(rows) for rows in (0, 1, 3, 5, 7)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert curve((4, 1.0)).seconds(8) == 2.0


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.001, 10.0)), min_size=1), st.integers(1, 400))
def test_more_rows_never_cost_less(points: list[tuple[int, float]], num_rows: int) -> None:
    costs = curve(*points)
    assert 0.0 < costs.seconds(num_rows) <= costs.seconds(num_rows + 1)


def test_the_first_pass_of_a_shape_pays_for_its_kernels_and_is_not_believed() -> None:
    costs = curve((6, 1.0), (6, 1.0), (6, 1.0), (8, 1.2), (8, 1.2), (8, 1.2), (7, 9.0))
    assert costs.seconds(7) < 3.0
    costs.observe(7, 1.1)
    assert costs.seconds(7) == pytest.approx(1.1)


def test_points_that_contradict_each_other_are_pooled_by_how_often_they_were_measured() -> None:
    costs = curve(*[(4, 3.0)] * 2, *[(5, 1.0)] * 11)
    assert costs.seconds(4) == costs.seconds(5) == pytest.approx((3.0 + 10 * 1.0) / 11)


def test_it_follows_a_machine_that_becomes_slower_and_shrugs_off_a_hiccup() -> None:
    costs = curve(*[(8, 1.0)] * 30)
    costs.observe(8, 1000.0)
    assert costs.seconds(8) < 1.2
    for _ in range(200):
        costs.observe(8, 2.0)
    assert costs.seconds(8) == pytest.approx(2.0, rel=0.01)
