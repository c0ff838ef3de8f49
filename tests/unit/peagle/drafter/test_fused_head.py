from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from peagle.drafter.fused_head import fuse_projections
from peagle.drafter.head import DraftHead
from peagle.drafter.reference import CausalAttention
from peagle.layers.linear import PackedLinear, pack_linears
from tests.builders.head import tiny_head


def hidden_states(head: DraftHead, num_slots: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(head.config.vocab_size, (num_slots,), generator=generator)
    features = torch.randn(num_slots, head.config.feature_size, generator=generator).to(head.dtype)
    attend = CausalAttention(scaling=head.scaling)
    hidden: torch.Tensor = head(token_ids, head.fuse(features), torch.arange(num_slots) + 40, attend)
    return hidden


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True}, {"mlp_bias": True}, {"qk_norm": True}], ids=str)
def test_computes_what_the_obvious_head_does(overrides: dict[str, Any]) -> None:
    head = tiny_head(**overrides)
    fused = copy.deepcopy(head)
    fuse_projections(fused)
    torch.testing.assert_close(hidden_states(fused), hidden_states(head), rtol=0, atol=1e-12)


def test_every_product_is_packed() -> None:
    head = tiny_head(dtype=torch.float32)
    expected = hidden_states(head)
    fuse_projections(head)
    pack_linears(head)
    assert not any(isinstance(module, torch.nn.Linear) for module in head.modules())
    num_packed = sum(isinstance(module, PackedLinear) for module in head.modules())
    assert num_packed == 2 + 4 * head.config.num_hidden_layers  # fc and lm_head; qkv, o, gate_up and down
    torch.testing.assert_close(hidden_states(head), expected, rtol=0.02, atol=0.02)  # weights are rounded to fp16
