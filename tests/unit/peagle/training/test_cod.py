"""Which elements are drawn: nested chains, the wanted counts, everything a draft could have as context."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from peagle.training.cod import Elements, sample_elements

SUPERVISED = st.lists(st.booleans(), min_size=1, max_size=60).map(lambda flags: np.array(flags))


def draw(flags: np.ndarray, *, depth: int, retention: float, floor: float = 0.2, seed: int = 0) -> Elements:
    rng = np.random.default_rng(seed)
    return sample_elements(flags, depth=depth, retention=retention, floor=floor, rng=rng)


def pairs(elements: Elements) -> set[tuple[int, int]]:
    return set(zip(elements.anchors.tolist(), elements.depths.tolist(), strict=True))


@given(SUPERVISED, st.integers(1, 7), st.floats(0.05, 1.0), st.integers(0, 5))
def test_chains_are_whole_and_supervised(flags: np.ndarray, depth: int, retention: float, seed: int) -> None:
    elements = draw(flags, depth=depth, retention=retention, seed=seed)
    found = pairs(elements)
    assert len(found) == len(elements)
    assert {anchor for anchor, d in found if d == 0} == set(range(len(flags)))
    for anchor, d in found:
        assert 0 <= anchor + d < len(flags)
        assert d < depth
        if d:
            assert (anchor, d - 1) in found
            assert flags[anchor + d]


@given(st.integers(1, 7), st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_each_depth_keeps_its_share(depth: int, retention: float, floor: float) -> None:
    flags = np.ones(80, dtype=np.bool_)
    counts = np.bincount(draw(flags, depth=depth, retention=retention, floor=floor).depths)
    before = 81
    for d, count in enumerate(counts.tolist()):
        wanted = round((80 - d) * max(retention**d, floor))
        # No more than have a chain; a chain that has come to the end of the sequence has no next slot.
        assert count in {min(wanted, before - 1), min(wanted, before)}
        before = count


def test_kept_positions_are_drawn_evenly() -> None:
    flags = np.ones(20, dtype=np.bool_)
    counts = np.zeros(20)
    for seed in range(2000):
        elements = draw(flags, depth=2, retention=0.5, seed=seed)
        counts += np.bincount(elements.positions[elements.depths == 1], minlength=20)
    assert counts[0] == 0  # slot 0 has no anchor before it
    expected = counts[1:].mean()
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 42.3  # chi-square, 18 degrees, one in a thousand


def test_the_same_numbers_give_the_same_elements() -> None:
    flags = np.arange(50) % 7 > 1
    first, again, other = (draw(flags, depth=5, retention=0.6, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(first.anchors, again.anchors)
    assert np.array_equal(first.depths, again.depths)
    assert pairs(first) != pairs(other)


@given(SUPERVISED, st.integers(1, 5))
def test_by_chain_only_changes_the_order(flags: np.ndarray, depth: int) -> None:
    elements = draw(flags, depth=depth, retention=0.7)
    ordered = elements.by_chain()
    assert pairs(ordered) == pairs(elements)
    masks = list(zip(ordered.anchors.tolist(), ordered.depths.tolist(), strict=True))[ordered.num_real :]
    assert masks == sorted(masks)
    assert ordered.anchors[: ordered.num_real].tolist() == list(range(len(flags)))
