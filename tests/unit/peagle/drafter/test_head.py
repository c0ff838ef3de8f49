from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from peagle.drafter.head import DraftHead, FirstHeadLayer
from peagle.drafter.reference import CausalAttention
from peagle.layers.linear import pack_linears
from tests.builders.head import tiny_head

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def run(head: DraftHead, token_ids: Tensor, fused: Tensor, positions: Tensor) -> Tensor:
    hidden: Tensor = head(token_ids, fused, positions, CausalAttention(scaling=head.scaling))
    return hidden


def slots(head: DraftHead, num_slots: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(head.config.vocab_size, (num_slots,), generator=generator)
    features = torch.randn(num_slots, head.config.feature_size, generator=generator).to(head.dtype)
    return token_ids, head.fuse(features), torch.arange(num_slots) + 40


def llama_config(rope_scaling: dict[str, Any] | None) -> Any:
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rope_theta=5e4,
        rope_scaling=rope_scaling,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )


def llama_norm(weight: Tensor) -> Any:
    norm = LlamaRMSNorm(len(weight), 1e-6)
    norm.weight.data = weight
    return norm


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("rope_scaling", [None, LLAMA3])
def test_layers_are_those_of_llama_and_eagle(norm_before_residual: bool, rope_scaling: dict[str, Any] | None) -> None:
    head = tiny_head(
        dtype=torch.float32, rope_theta=5e4, rope_scaling=rope_scaling, norm_before_residual=norm_before_residual
    )
    token_ids, fused, positions = slots(head)
    config = llama_config(rope_scaling)
    cos, sin = LlamaRotaryEmbedding(config)(fused, positions[None])
    mask = torch.full((7, 7), float("-inf")).triu(1)

    first = head.layers[0]
    assert isinstance(first, FirstHeadLayer)
    feature = llama_norm(first.hidden_norm.weight)(fused)
    embedded = llama_norm(first.input_layernorm.weight)(head.embed_tokens(token_ids))
    wide = torch.cat([embedded, feature], -1)
    q, k, v = (
        (wide @ projection.weight.T).view(1, 7, -1, 8).transpose(1, 2)
        for projection in (first.self_attn.q_proj, first.self_attn.k_proj, first.self_attn.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    attended = ((q @ k.transpose(2, 3) * 8**-0.5 + mask).softmax(-1) @ v).transpose(1, 2).reshape(7, 32)
    hidden = (feature if norm_before_residual else fused) + attended @ first.self_attn.o_proj.weight.T
    mlp = LlamaMLP(config)
    mlp.load_state_dict(first.mlp.state_dict())
    hidden = hidden + mlp(llama_norm(first.post_attention_layernorm.weight)(hidden))

    layer = LlamaDecoderLayer(config, layer_idx=0)
    layer.load_state_dict(head.layers[1].state_dict())
    hidden = layer(hidden[None], attention_mask=mask[None, None], position_embeddings=(cos, sin))[0]
    torch.testing.assert_close(run(head, token_ids, fused, positions), hidden, rtol=1e-4, atol=1e-5)
    logits = llama_norm(head.norm.weight)(hidden) @ head.lm_head.weight.T
    torch.testing.assert_close(head.logits(hidden), logits, rtol=1e-4, atol=1e-5)


def test_rotation_is_relative() -> None:
    # The convention of slot positions may be shifted as a whole, never within a sequence.
    head = tiny_head()
    token_ids, fused, positions = slots(head)
    here, there = run(head, token_ids, fused, positions), run(head, token_ids, fused, positions + 100)
    assert (here - there).abs().max() < 1e-4  # angles are computed in float32
    uneven = positions.clone()
    uneven[3:] += 1
    assert (here - run(head, token_ids, fused, uneven)).abs().max() > 1e-3


def test_frequencies_survive_bfloat16() -> None:
    head = tiny_head(rope_scaling=LLAMA3)
    exact = head.rotary.inv_freq.clone()
    rotation = head.to(torch.bfloat16).rotary(torch.tensor([1000]), torch.bfloat16)
    assert torch.equal(head.rotary.inv_freq, exact)
    assert rotation.cos.dtype == torch.bfloat16


def test_mask_feature_is_learned_through_fc() -> None:
    head = tiny_head().requires_grad_(True)
    token_ids, fused, positions = slots(head)
    fused = torch.cat([fused[:4], head.fused_mask().expand(3, -1)])
    loss = head.logits(run(head, token_ids, fused, positions)).square().sum()
    torch.autograd.backward(loss)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())
    assert torch.equal(head.fused_mask(), head.fuse(head.mask_hidden))


def test_offsets_and_scale() -> None:
    head = tiny_head(draft_vocab_size=4, logit_scale=0.5)
    head.draft_to_target_offsets.copy_(torch.tensor([7, 7, 10, 11]))
    assert head.to_target_ids(torch.tensor([[0, 1], [3, 2]])).tolist() == [[7, 8], [14, 12]]
    hidden = torch.randn(2, 32, dtype=torch.float64)
    assert torch.equal(head.logits(hidden), head.lm_head(head.norm(hidden)) * 0.5)


def test_packed_linears() -> None:
    head = tiny_head(dtype=torch.float32)
    half = tiny_head(dtype=torch.float32)
    for parameter in half.parameters():
        if parameter.dim() == 2:
            parameter.copy_(parameter.half().float())
    half.embed_tokens.weight.copy_(head.embed_tokens.weight)
    inputs = slots(half)
    pack_linears(head)
    assert not any(type(module) is torch.nn.Linear for module in head.modules())
    torch.testing.assert_close(run(head, *inputs), run(half, *inputs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.fused_mask(), half.fused_mask(), rtol=1e-4, atol=1e-4)
