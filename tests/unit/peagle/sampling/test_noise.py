from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.sampling.noise import uniform


def chi_square(counts: list[int]) -> float:
    """Distance of the counts from equal shares, in standard deviations of the statistic."""
    expected = sum(counts) / len(counts)
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("seed", "position", "stream", "expected"),
    [
        (0, 0, 0, "0x1.1c13ade1c7e5cp-3"),
        (0, 1, 0, "0x1.1396e6040319ep-2"),
        (1, 0, 0, "0x1.631405e8db1b0p-1"),
        (-1, 7, 0, "0x1.0fe22678e7088p-3"),
        (2**63 - 1, 131071, 0, "0x1.b9f0f5816e669p-1"),
        (-(2**63), 5, 3, "0x1.09f59e3c4b186p-1"),
    ],
)
def test_golden_values(seed: int, position: int, stream: int, expected: str) -> None:
    # A change here changes the answer of every seeded request.
    assert uniform(seed, position, stream) == float.fromhex(expected)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 8))
def test_range_and_wrap(seed: int, position: int, stream: int) -> None:
    value = uniform(seed, position, stream)
    assert 0.0 <= value < 1.0
    assert value == uniform(seed % 2**64, position, stream)


@pytest.mark.parametrize("axis", ["seed", "position", "stream"])
def test_uniform_along_every_axis(axis: str) -> None:
    counts = [0] * 64
    for i in range(20_000):
        counts[int(uniform(**{"seed": 3, "position": 11, axis: i}) * 64)] += 1
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("steps", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (2**32, 0, 0), (-1, 1, 0)])
def test_neighbours_are_independent(steps: tuple[int, int, int]) -> None:
    counts = [0] * 64
    for i in range(20_000):
        key = (i % 200, i // 200, 0)
        here = uniform(*key)
        there = uniform(*(k + step for k, step in zip(key, steps, strict=True)))
        counts[int(here * 8) * 8 + int(there * 8)] += 1
    assert abs(chi_square(counts)) < 5


def test_low_bits_are_uniform() -> None:
    counts = [0] * 64
    for i in range(20_000):
        counts[int(uniform(i, i) * 2**53) % 64] += 1
    assert abs(chi_square(counts)) < 5
