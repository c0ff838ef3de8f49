from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.scheduler.survival import SurvivalModel


@given(st.lists(st.floats(0.0, 1.0), max_size=8), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_survival_never_rises_and_stays_a_probability(
    confidences: list[float], observed: list[tuple[int, int]]
) -> None:
    model = SurvivalModel()
    for count, accepted in observed:
        model.observe(0, [0.5] * max(count, accepted), num_accepted=accepted)
    found = model.survivals(0, confidences)
    assert len(found) == len(confidences)
    assert all(0.0 <= later <= earlier <= 1.0 for earlier, later in zip([1.0, *found], found, strict=False))


def test_a_confidence_is_believed_until_it_proves_wrong() -> None:
    model = SurvivalModel()
    assert model.survivals(0, [0.9, 0.5]) == pytest.approx([0.9, 0.45])
    for seq_id in range(300):
        model.observe(seq_id, [0.9], num_accepted=seq_id % 2)
    assert model.survivals(999, [0.9]) == pytest.approx([0.5], abs=0.03)


def test_depths_and_ranges_of_confidence_are_learned_apart() -> None:
    random.seed(0)
    model = SurvivalModel()
    rates = {0.9: (0.8, 0.3), 0.3: (0.4, 0.1)}
    for seq_id in range(3000):
        confidence = random.choice([0.9, 0.3])
        first, second = rates[confidence]
        accepted = 0 if random.random() > first else 1 if random.random() > second else 2
        model.observe(seq_id, [confidence] * 2, num_accepted=accepted)
    assert model.survivals(-1, [0.9, 0.9]) == pytest.approx([0.8, 0.24], abs=0.05)
    assert model.survivals(-1, [0.3, 0.3]) == pytest.approx([0.4, 0.04], abs=0.05)


def test_a_sequence_that_does_better_than_others_is_expected_to_go_on_so() -> None:
    model = SurvivalModel()
    for step in range(200):
        model.observe(1, [0.5], num_accepted=1)
        model.observe(2, [0.5], num_accepted=step % 5 == 0)
    assert model.survivals(1, [0.5])[0] > model.survivals(3, [0.5])[0] > model.survivals(2, [0.5])[0]
    model.forget(1)
    assert model.survivals(1, [0.5]) == model.survivals(3, [0.5])
