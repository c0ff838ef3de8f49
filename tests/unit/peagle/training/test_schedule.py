"""The learning rate: it rises, stays, and falls only if it is told to."""

from __future__ import annotations

import pytest

from peagle.training.config import OptimiserOptions
from peagle.training.schedule import learning_rate


def test_it_rises_to_the_highest_rate_and_stays() -> None:
    options = OptimiserOptions(learning_rate=1.0, warmup_steps=4, decay_steps=0)
    rates = [learning_rate(options, step=step, steps_left=3) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_it_falls_to_a_tenth_over_the_last_steps() -> None:
    options = OptimiserOptions(learning_rate=1.0, warmup_steps=0, decay_steps=4)
    rates = [learning_rate(options, step=100, steps_left=left) for left in (9, 4, 3, 2, 1, 0, -2)]
    assert rates == pytest.approx([1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1])


def test_it_stays_where_the_end_is_unknown() -> None:
    options = OptimiserOptions(learning_rate=2.0, warmup_steps=1, decay_steps=50)
    assert learning_rate(options, step=0, steps_left=None) == 2.0
