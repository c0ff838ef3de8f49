"""The mask, however it is made, is the rule; and what a slot sees in training is what it sees in serving."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.training.cod import Elements, sample_elements
from peagle.training.mask import VisibilityTable, visible, visible_reference

TABLE = VisibilityTable(max_slots=16, depth=4)


def random_elements(num_slots: int, *, depth: int, retention: float, seed: int) -> Elements:
    rng = np.random.default_rng(seed)
    flags = rng.random(num_slots) < 0.8
    return sample_elements(flags, depth=depth, retention=retention, floor=0.1, rng=rng)


@given(st.integers(1, 16), st.integers(1, 4), st.floats(0.1, 1.0), st.integers(0, 99), st.booleans())
def test_all_masks_are_the_rule(num_slots: int, depth: int, retention: float, seed: int, by_chain: bool) -> None:
    elements = random_elements(num_slots, depth=depth, retention=retention, seed=seed)
    elements = elements.by_chain() if by_chain else elements
    expected = torch.from_numpy(visible_reference(elements))
    assert torch.equal(visible(elements), expected)
    assert torch.equal(TABLE.lookup(elements), expected)


def test_the_rule_by_hand() -> None:
    elements = Elements(anchors=np.array([0, 1, 2, 0, 1, 0]), depths=np.array([0, 0, 0, 1, 1, 2]))
    seen = ["100000", "110000", "111000", "100100", "110010", "100101"]
    assert visible_reference(elements).astype(int).tolist() == [[int(flag) for flag in row] for row in seen]
