"""Every draft of a whole answer at once, without decoding it.

A greedy draft depends on the committed tokens and on nothing that was drafted or rejected before. So the drafts after
each token of a known answer are computed depth by depth, each depth for all places together: a slot sees the real
slots up to its anchor, and the mask slots of its own chain (the attention rule of training, peagle.md 3.3, without
dropped tokens). Owns this pass. Refuses to know how an answer came about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.drafter.head import DraftHead


@torch.no_grad()
def draft_answer(
    head: DraftHead, token_ids: Tensor, features: Tensor, *, num_prompt_tokens: int, num_speculative_tokens: int
) -> Tensor:
    """Drafts of a P-EAGLE head after each token of an answer but the last, as target ids [R - 1, K].

    Args:
        head: on the device of `token_ids`.
        token_ids: prompt and answer, [P + R] int64, R >= 2.
        features: of these tokens, [P + R, n_aux * H_t].
        num_prompt_tokens: P.
        num_speculative_tokens: K.
    """
    attend, hidden = _read_slots(head, token_ids, features, num_prompt_tokens)
    drafts = [_likeliest(head, hidden)]
    mask_ids = torch.full_like(attend.anchors, head.config.mask_token_id)
    fused_mask = head.fused_mask().expand(len(mask_ids), -1)
    for depth in range(1, num_speculative_tokens):
        drafts.append(_likeliest(head, head(mask_ids, fused_mask, attend.anchors + depth, attend)))
    return torch.stack(drafts, 1)


@torch.no_grad()
def draft_answer_in_turn(
    head: DraftHead, token_ids: Tensor, features: Tensor, *, num_prompt_tokens: int, num_speculative_tokens: int
) -> Tensor:
    """As `draft_answer`, for a head that drafts one token after the other, as EAGLE-3 does.

    A further slot has the draft before it as its token, and the head's own hidden state, before the final norm, as its
    feature (arXiv 2503.01840).
    """
    attend, hidden = _read_slots(head, token_ids, features, num_prompt_tokens)
    drafts = [_likeliest(head, hidden)]
    for depth in range(1, num_speculative_tokens):
        hidden = head(drafts[-1], hidden, attend.anchors + depth, attend)
        drafts.append(_likeliest(head, hidden))
    return torch.stack(drafts, 1)


def _read_slots(
    head: DraftHead, token_ids: Tensor, features: Tensor, num_prompt_tokens: int
) -> tuple[_ChainAttention, Tensor]:
    """Every real slot but the last, whose drafts would follow the whole answer; hidden states [R - 1, H] of anchors."""
    num_slots = len(token_ids) - 2
    positions = torch.arange(num_slots, device=token_ids.device)
    # anchors are the slots whose newest token is of the answer
    attend = _ChainAttention(scaling=head.scaling, anchors=positions[num_prompt_tokens - 1 :])
    hidden = head(token_ids[1:-1], head.fuse(features[:num_slots]), positions, attend)
    return attend, hidden[num_prompt_tokens - 1 :]


def _likeliest(head: DraftHead, hidden: Tensor) -> Tensor:
    return head.to_target_ids(head.logits(hidden).argmax(-1))


@dataclass(slots=True, kw_only=True, eq=False)
class _LayerCache:
    """Keys and values of one layer."""

    key: Tensor  # [num_slots, num_kv_heads, head_dim], of the real slots
    value: Tensor
    chain_keys: list[Tensor] = field(
        default_factory=list
    )  # for each depth from 1, [num_anchors, num_kv_heads, head_dim]
    chain_values: list[Tensor] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class _ChainAttention:
    """See `head.Attend`: the first pass brings every real slot, each later one the next depth of all anchors."""

    scaling: float
    anchors: Tensor  # [num_anchors]
    layers: list[_LayerCache] = field(default_factory=list)

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer_index == len(self.layers):
            self.layers.append(_LayerCache(key=key, value=value))
            return self._attend_causally(query, key, value)
        cache = self.layers[layer_index]
        cache.chain_keys.append(key)
        cache.chain_values.append(value)
        return self._attend_to_chain(query, cache)

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
        weights = scores.softmax(-1)
        output = torch.einsum("kgas,skh->akgh", weights[..., :num_slots], cache.value)
        output = output + torch.einsum("kgad,dakh->akgh", weights[..., num_slots:], chain_values)
        return output.flatten(1, 2)
