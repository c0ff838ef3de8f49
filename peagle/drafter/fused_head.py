"""A head's layers as serving runs them: projections with the same input are one product.

Decoding a few rows is bound by reading weights and by the number of calls, and a head is small enough for the calls to
matter. Owns the rearrangement of a loaded head, and says nothing about what the layers compute: `head` is the obvious
form, the one that trains and that files are made of, and a test compares the two. Refuses to know how weights are
stored (`layers.linear`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peagle.drafter.head import Attend, DraftHead, HeadAttention, HeadMLP
from peagle.drafter.rope import Rotation
from peagle.layers.linear import fuse_linears


class FusedAttention(nn.Module):
    """`HeadAttention` with one product for queries, keys and values.

    Args:
        source: whose weights these are; it is not to be used any more.
    """

    def __init__(self, source: HeadAttention) -> None:
        super().__init__()
        self.head_dim = source.head_dim
        self.num_heads = source.q_proj.out_features // source.head_dim
        self.num_kv_heads = source.k_proj.out_features // source.head_dim
        self.qkv_proj = fuse_linears([source.q_proj, source.k_proj, source.v_proj])
        self.o_proj = source.o_proj
        self.q_norm, self.k_norm = source.q_norm, source.k_norm
        self._has_head_norms = not isinstance(source.q_norm, nn.Identity)

    def forward(self, rows: Tensor, rotate: Rotation, attend: Attend, layer_index: int) -> Tensor:
        """Attention output of rows [T, input_size]: [T, H]."""
        heads = self.qkv_proj(rows).unflatten(-1, (-1, self.head_dim))  # [T, num_heads + 2 * num_kv_heads, head_dim]
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = heads[:, :num_rotated]
        if self._has_head_norms:
            query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
            rotated = torch.cat([self.q_norm(query), self.k_norm(key)], 1)
        rotated = rotate(rotated)
        query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        output: Tensor = self.o_proj(attend(layer_index, query, key, heads[:, num_rotated:]).flatten(1))
        return output


class FusedMLP(nn.Module):
    """`HeadMLP` with one product for gate and up.

    Args:
        source: whose weights these are; it is not to be used any more.
    """

    def __init__(self, source: HeadMLP) -> None:
        super().__init__()
        self.gate_up_proj = fuse_linears([source.gate_proj, source.up_proj])
        self.down_proj, self.act = source.down_proj, source.act

    def forward(self, rows: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        gate, up = self.gate_up_proj(rows).chunk(2, -1)  # [T, intermediate_size] each
        output: Tensor = self.down_proj(self.act(gate) * up)
        return output


def fuse_projections(head: DraftHead) -> None:
    """Rearrange a loaded head in place. Its `state_dict` has other names from here on."""
    for layer in head.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, HeadAttention)
        assert isinstance(mlp, HeadMLP)
        layer.self_attn, layer.mlp = FusedAttention(attention), FusedMLP(mlp)
