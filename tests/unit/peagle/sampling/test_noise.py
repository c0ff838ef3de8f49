from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.sampling.noise import Stream, exponential, row_key, step_key, uniform
from peagle.sampling.race import as_int64, exponentials, uniforms

Key = tuple[int, int, int]  # seed, position, token id


def at(key: Key) -> float:
    seed, position, token_id = key
    return uniform(row_key(seed, position), token_id)


def chi_square(counts: list[int]) -> float:
    """Distance of the counts from equal shares, in standard deviations of the statistic."""
    expected = sum(counts) / len(counts)
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((0, 0, 0), "0x1.1c13ade1c7e5cp-3"),
        ((0, 1, 0), "0x1.1396e6040319ep-2"),
        ((1, 0, 5), "0x1.b0d3d1465828bp-1"),
        ((-1, 7, 49151), "0x1.df5e9c530be29p-1"),
        ((2**63 - 1, 131071, 1), "0x1.e6b45e16b506cp-3"),
        ((-(2**63), 5, 3), "0x1.e2b2c332e2ac5p-1"),
    ],
)
def test_golden_values(key: Key, expected: str) -> None:
    # A change here changes the answer of every seeded request.
    assert at(key) == float.fromhex(expected)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**20))
def test_range_and_wrap(seed: int, position: int, token_id: int) -> None:
    value = at((seed, position, token_id))
    assert 0.0 < value < 1.0
    assert value == at((seed % 2**64, position, token_id))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_along_every_axis(axis: int) -> None:
    counts = [0] * 64
    for i in range(20_000):
        key = [3, 11, 7]
        key[axis] = i
        counts[int(at((key[0], key[1], key[2])) * 64)] += 1
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize(
    "step", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, -1), (0, 1, 1), (2**32, 0, 0), (-1, 1, 0)]
)
def test_neighbours_are_independent(step: Key) -> None:
    counts = [0] * 64
    for i in range(20_000):
        key = (i % 200, i // 200, 9)
        there = (key[0] + step[0], key[1] + step[1], key[2] + step[2])
        counts[int(at(key) * 8) * 8 + int(at(there) * 8)] += 1
    assert abs(chi_square(counts)) < 5


def test_low_bits_are_uniform() -> None:
    counts = [0] * 64
    for i in range(20_000):
        counts[int(at((i, i, i)) * 2**52) % 64] += 1
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("stream", Stream)
def test_streams_are_independent_of_the_token_and_of_other_steps(stream: Stream) -> None:
    for seed_step, position_step in [(0, 0), (0, 1), (1, 0), (1, -1)]:
        counts = [0] * 64
        for i in range(20_000):
            coin = uniform(step_key(i % 200, i // 200, stream), 0)
            other = step_key(i % 200 + seed_step, i // 200 + position_step, Stream.COINS)
            token = row_key(i % 200 + seed_step, i // 200 + position_step)
            is_same = (seed_step, position_step, stream) == (0, 0, Stream.COINS)
            there = uniform(token if is_same else other, 0)
            counts[int(coin * 8) * 8 + int(there * 8)] += 1
        assert abs(chi_square(counts)) < 5


def test_tensors_hold_the_same_numbers() -> None:
    keys = [row_key(seed, position) for seed, position in [(0, 0), (-5, 3), (2**63 - 1, 10**6), (17, 2)]]
    token_ids = [0, 1, 2, 300, 49151, 201087]
    noise = exponentials(torch.tensor([[as_int64(key)] for key in keys]), torch.tensor(token_ids))
    wanted = [[exponential(key, token_id) for token_id in token_ids] for key in keys]
    assert torch.allclose(noise, torch.tensor(wanted, dtype=torch.float64), rtol=1e-14, atol=0.0)
    exact = [[uniform(key, token_id) for token_id in token_ids] for key in keys]
    assert uniforms(torch.tensor([[as_int64(key)] for key in keys]), torch.tensor(token_ids)).tolist() == exact
    own_ids = torch.tensor([token_ids] * len(keys))
    assert torch.equal(noise, exponentials(torch.tensor([[as_int64(key)] for key in keys]), own_ids))
