"""Every element belongs to one segment, and each segment has all that its own elements see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.training.mask import visible_reference
from peagle.training.partition import partition
from tests.unit.peagle.training.test_mask import random_elements


@given(st.integers(1, 25), st.integers(1, 5), st.integers(1, 7), st.integers(0, 20))
def test_segments_own_everything_once_and_see_what_they_need(
    num_slots: int, depth: int, num_segments: int, seed: int
) -> None:
    elements = random_elements(num_slots, depth=depth, retention=0.8, seed=seed).by_chain()
    pairs = list(zip(elements.anchors.tolist(), elements.depths.tolist(), strict=True))
    seen = visible_reference(elements)
    owned: list[tuple[int, int]] = []
    for segment in partition(elements, num_slots=num_slots, num_segments=num_segments):
        there = list(zip(segment.elements.anchors.tolist(), segment.elements.depths.tolist(), strict=True))
        own = [pair for pair, is_own in zip(there, segment.is_own, strict=True) if is_own]
        owned += own
        for pair in own:
            needed = {pairs[key] for key in np.flatnonzero(seen[pairs.index(pair)])}
            assert needed <= set(there)
    assert sorted(owned) == sorted(pairs)


@pytest.mark.parametrize("num_segments", [2, 3])
def test_a_segment_is_smaller_than_the_whole(num_segments: int) -> None:
    elements = random_elements(40, depth=6, retention=0.9, seed=0)
    segments = partition(elements, num_slots=40, num_segments=num_segments)
    assert len(segments) == num_segments
    masks = int((elements.depths > 0).sum())
    for segment in segments:
        assert (segment.elements.depths > 0).sum() < masks / num_segments * 1.5
