"""Attention by blocks equals attention under the whole mask, and so do its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peagle.training.cod import Elements
from peagle.training.element_attention import BlockedAttention, DenseAttention
from peagle.training.partition import partition
from tests.unit.peagle.training.test_mask import random_elements

CPU = torch.device("cpu")


def random_rows(num_rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    return [
        torch.randn(num_rows, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]


def assert_equal_attention(elements: Elements, *, block_anchors: int) -> None:
    dense = DenseAttention(elements, scaling=0.3, device=CPU)
    blocked = BlockedAttention(elements, scaling=0.3, device=CPU, block_anchors=block_anchors)
    rows = random_rows(len(elements))
    expected, found = dense(0, *rows), blocked(0, *rows)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0.0)
    upstream = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(found, rows, upstream), torch.autograd.grad(expected, rows, upstream), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("num_slots", [1, 2, 9, 30])
@pytest.mark.parametrize("block_anchors", [1, 4, 64])
@pytest.mark.parametrize("retention", [0.5, 1.0])
def test_blocks_equal_the_whole(num_slots: int, block_anchors: int, retention: float) -> None:
    elements = random_elements(num_slots, depth=5, retention=retention, seed=num_slots).by_chain()
    assert_equal_attention(elements, block_anchors=block_anchors)


def test_blocks_equal_the_whole_in_each_segment() -> None:
    elements = random_elements(30, depth=5, retention=0.8, seed=1).by_chain()
    for segment in partition(elements, num_slots=30, num_segments=4):
        assert_equal_attention(segment.elements, block_anchors=3)


def test_without_mask_slots_it_is_causal() -> None:
    assert_equal_attention(random_elements(7, depth=1, retention=1.0, seed=0).by_chain(), block_anchors=2)
