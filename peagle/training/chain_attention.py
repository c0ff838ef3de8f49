"""Attention of chains over a sequence whose keys are kept: every real slot once, then depth after depth of all anchors.

A slot of a chain sees the real slots up to its anchor, and its own chain up to itself (peagle.md 3.3). Owns the keys
and values of one sequence, gradients included, and this rule. Refuses to know what the slots hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class _LayerCache:
    """Keys and values of one layer."""

    key: Tensor  # [num_slots, num_kv_heads, head_dim], of the real slots
    value: Tensor
    # for each depth from 1, [num_anchors, num_kv_heads, head_dim]
    chain_keys: list[Tensor] = field(default_factory=list)
    chain_values: list[Tensor] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class ChainAttention:
    """See `head.Attend`: the first pass brings every real slot, each later one the next depth of all anchors."""

    scaling: float
    anchors: Tensor  # [num_anchors] int64, real slots
    _layers: list[_LayerCache] = field(default_factory=list)

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, num_heads, head_dim]."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotation may have widened them
        if layer_index == len(self._layers):
            self._layers.append(_LayerCache(key=key, value=value))
            return self._attend_causally(query, key, value)
        cache = self._layers[layer_index]
        cache.chain_keys.append(key)
        cache.chain_values.append(value)
        return self._attend_to_chain(query, cache)

    def keep(self, places: Tensor) -> None:
        """Go on with some of the anchors, by index or flag."""
        self.anchors = self.anchors[places]
        for cache in self._layers:
            cache.chain_keys = [key[places] for key in cache.chain_keys]
            cache.chain_values = [value[places] for value in cache.chain_values]

    def _attend_causally(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (rows.transpose(0, 1)[None] for rows in (query, key, value))  # [1, heads, num_slots, head_dim]
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True)
        return output[0].transpose(0, 1)

    def _attend_to_chain(self, query: Tensor, cache: _LayerCache) -> Tensor:
        num_slots, num_kv_heads, _ = cache.key.shape
        grouped = query.reshape(len(query), num_kv_heads, -1, query.shape[-1])  # [A, num_kv_heads, group, head_dim]
        chain_keys, chain_values = torch.stack(cache.chain_keys), torch.stack(cache.chain_values)  # [depth, A, kv, hd]
        of_context = torch.einsum("akgh,skh->kgas", grouped, cache.key)
        of_chain = torch.einsum("akgh,dakh->kgad", grouped, chain_keys)
        is_later = torch.arange(num_slots, device=self.anchors.device) > self.anchors[:, None]  # [A, num_slots]
        scores = torch.cat([of_context.masked_fill(is_later, float("-inf")), of_chain], -1) * self.scaling
        weights = scores.softmax(-1).to(cache.value.dtype)
        output = torch.einsum("kgas,skh->akgh", weights[..., :num_slots], cache.value)
        output = output + torch.einsum("kgad,dakh->akgh", weights[..., num_slots:], chain_values)
        return output.flatten(1, 2)
