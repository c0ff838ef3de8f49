"""Drafting spelled out: the whole sequence from scratch, dense attention, no cache. Slow on purpose.

The truth that `peagle` and `eagle3` are compared with after any history of acceptance, rejection, chunking and
preemption: only the committed tokens and their features may matter. Owns nothing but the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.drafter.head import DraftHead


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceDrafts:
    """What the head makes of one sequence."""

    logits: Tensor  # [K, V_d]
    keys: list[Tensor]  # for each layer, [num_tokens - 1, num_kv_heads, head_dim], without the mask slots
    values: list[Tensor]  # as keys


@dataclass(slots=True, kw_only=True, eq=False)
class CausalAttention:
    """Dense attention over rows in the order of their positions; remembers keys and values."""

    scaling: float
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `head.Attend`."""
        assert layer_index == len(self.keys)
        self.keys.append(key)
        self.values.append(value)
        num_rows, num_heads, _ = query.shape
        repeats = num_heads // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scaling
        is_hidden = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


@torch.no_grad()
def reference_drafts(
    head: DraftHead, token_ids: Sequence[int], features: Tensor, num_speculative_tokens: int
) -> ReferenceDrafts:
    """Draft after a committed history.

    Args:
        head: on the CPU.
        token_ids: every committed token, the newest one last.
        features: of every committed token but the newest, [len(token_ids) - 1, n_aux * H_t].
        num_speculative_tokens: K.
    """
    num_slots, num_masks = len(token_ids) - 1, num_speculative_tokens - 1
    mask_token_id = head.config.mask_token_id
    assert mask_token_id is not None
    slot_tokens = torch.tensor([*token_ids[1:], *[mask_token_id] * num_masks])
    fused = torch.cat([head.fuse(features), head.fused_mask().expand(num_masks, -1)])
    attend = CausalAttention(scaling=head.scaling)
    hidden = head(slot_tokens, fused, torch.arange(num_slots + num_masks), attend)
    return ReferenceDrafts(
        logits=head.logits(hidden[num_slots - 1 :]),
        keys=[key[:num_slots] for key in attend.keys],
        values=[value[:num_slots] for value in attend.values],
    )


@torch.no_grad()
def reference_drafts_in_turn(
    head: DraftHead, token_ids: Sequence[int], features: Tensor, num_speculative_tokens: int
) -> ReferenceDrafts:
    """As `reference_drafts`, one draft after the other: the whole sequence again for each of them."""
    num_slots = len(token_ids) - 1
    slot_tokens, fused = list(token_ids[1:]), head.fuse(features)
    logits: list[Tensor] = []
    attend = CausalAttention(scaling=head.scaling)
    for _ in range(num_speculative_tokens):
        attend = CausalAttention(scaling=head.scaling)
        hidden = head(torch.tensor(slot_tokens), fused, torch.arange(len(slot_tokens)), attend)
        logits.append(head.logits(hidden[-1:]))
        slot_tokens.append(int(head.to_target_ids(logits[-1].argmax(-1))))
        fused = torch.cat([fused, head.feed_back(hidden[-1:])])
    return ReferenceDrafts(
        logits=torch.cat(logits),
        keys=[key[:num_slots] for key in attend.keys],
        values=[value[:num_slots] for value in attend.values],
    )
