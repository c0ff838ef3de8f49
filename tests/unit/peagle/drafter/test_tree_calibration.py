"""Measured rates: what counts as a trial, what they tend to, and what they are good for."""

from __future__ import annotations

import math
import random

import pytest

from peagle.drafter.tree import DraftTree, best_first_tree
from peagle.drafter.tree_calibration import TreeCalibration, geometric_prior
from peagle.errors import ConfigError

TOKENS = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
OTHER = -1  # a token that the head did not rank


def emit(tree: DraftTree, rates: list[list[float]], rng: random.Random) -> list[int]:
    """What a target emits that says each candidate with its rate, and -1 for any other token."""
    emitted: list[int] = []
    parent = -1
    for depth in range(len(TOKENS) + 1):
        weights = rates[depth] if depth < len(TOKENS) else []
        tokens = TOKENS[depth] if depth < len(TOKENS) else []
        emitted += rng.choices([*tokens, OTHER], [*weights, 1.0 - sum(weights)])
        children = [node for node, above in enumerate(tree.parents) if above == parent]
        accepted = [node for node in children if tree.token_ids[node] == emitted[-1]]
        if not accepted:
            return emitted
        parent = accepted[0]
    raise AssertionError


def test_candidates_up_to_the_first_miss_were_tried() -> None:
    calibration = TreeCalibration([[0.5, 0.5, 0.5]] * 3, prior_weight=1.0, decay=1.0)
    calibration.observe(TOKENS, [11, 20, OTHER])
    assert calibration.rates() == [[0.25, 0.75, 0.25], [0.75, 0.25, 0.25], [0.25, 0.25, 0.25]]
    calibration.observe(TOKENS, [12])  # perhaps no draft at all: the ranking says what it would have been
    assert calibration.rates() == [[0.5 / 3, 0.5, 0.5], [0.75, 0.25, 0.25], [0.25, 0.25, 0.25]]
    calibration.observe([[10]], [10, 99])
    assert calibration.rates()[0] == [1.5 / 4, 0.5, 0.5]


def test_rates_tend_to_the_truth_and_forget_the_past() -> None:
    rng = random.Random(0)
    first = [[0.6, 0.2, 0.1], [0.4, 0.3, 0.1], [0.3, 0.2, 0.2]]
    second = [[0.3, 0.3, 0.3], [0.7, 0.1, 0.1], [0.5, 0.2, 0.1]]
    calibration = TreeCalibration(geometric_prior(max_depth=3, max_rank=3), decay=0.999)
    for truth in (first, second):
        for _ in range(10_000):
            tree = best_first_tree(calibration.scores(), TOKENS, max_num_nodes=8)
            calibration.observe(TOKENS, emit(tree, truth, rng))
        for found, wanted in zip(calibration.rates(), truth, strict=True):
            assert found == pytest.approx(wanted, abs=0.08)


def test_a_measured_tree_accepts_more_than_one_built_on_belief() -> None:
    """A head that is sure of its first rank at every depth, and is wrong. It would never draft the third one."""
    rng = random.Random(1)
    believed = [[0.9, 0.05, 0.001]] * 3
    truth = [[0.3, 0.3, 0.3], [0.2, 0.2, 0.2], [0.2, 0.2, 0.2]]
    calibration = TreeCalibration(believed)
    for _ in range(600):
        tree = best_first_tree(calibration.scores(), TOKENS, max_num_nodes=3)
        calibration.observe(TOKENS, emit(tree, truth, rng))
    measured = best_first_tree(calibration.scores(), TOKENS, max_num_nodes=3)
    scores = [[math.log(rate) for rate in row] for row in believed]
    assert best_first_tree(scores, TOKENS, max_num_nodes=3).token_ids == (10, 20, 30)
    assert set(measured.token_ids) == {10, 11, 12}


def test_a_rate_never_becomes_zero_or_one() -> None:
    calibration = TreeCalibration([[0.5, 0.1]])
    for _ in range(5000):
        calibration.observe([[10, 11]], [10, 7])
    assert 0.0 < calibration.rates()[0][1] < 0.01
    assert 0.9 < calibration.rates()[0][0] < 1.0
    assert all(score < 0.0 for score in calibration.scores()[0])


def test_default_prior_is_a_distribution() -> None:
    prior = geometric_prior(max_depth=2, max_rank=50)
    assert len(prior) == 2
    assert 0.8 < sum(prior[0]) < 1.0
    assert prior[0][0] == 0.6


@pytest.mark.parametrize(
    ("prior", "prior_weight", "decay", "named"),
    [
        ([[0.5, 0.0]], 1.0, 0.9, "prior rates"),
        ([[1.0]], 1.0, 0.9, "prior rates"),
        ([[math.nan]], 1.0, 0.9, "prior rates"),
        ([[0.5]], 0.0, 0.9, "prior_weight"),
        ([[0.5]], 1.0, 0.0, "decay"),
        ([[0.5]], 1.0, 1.1, "decay"),
    ],
)
def test_settings_that_cannot_work(prior: list[list[float]], prior_weight: float, decay: float, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TreeCalibration(prior, prior_weight=prior_weight, decay=decay)
