"""Every draft of a whole answer at once, without decoding it.

A greedy draft depends on the committed tokens and on nothing that was drafted or rejected before. So the drafts after
each token of a known answer are computed depth by depth, each depth for all places together: a slot sees the real
slots up to its anchor, and the mask slots of its own chain (the attention rule of training, peagle.md 3.3, without
dropped tokens). Owns this pass. Refuses to know how an answer came about.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.training.chain_attention import ChainAttention


class DraftAnswer(Protocol):
    """See `draft_answer`."""

    def __call__(
        self,
        head: DraftHead,
        token_ids: Tensor,
        features: Tensor,
        *,
        num_prompt_tokens: int,
        num_speculative_tokens: int,
    ) -> Tensor:
        """Drafts after each token of an answer but the last, [R - 1, K]."""
        ...


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
    assert head.config.mask_token_id is not None  # a head without a mask drafts in turn
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
) -> tuple[ChainAttention, Tensor]:
    """Every real slot but the last, whose drafts would follow the whole answer; hidden states [R - 1, H] of anchors."""
    num_slots = len(token_ids) - 2
    positions = torch.arange(num_slots, device=token_ids.device)
    # anchors are the slots whose newest token is of the answer
    attend = ChainAttention(scaling=head.scaling, anchors=positions[num_prompt_tokens - 1 :])
    hidden = head(token_ids[1:-1], head.fuse(features[:num_slots]), positions, attend)
    return attend, hidden[num_prompt_tokens - 1 :]


def _likeliest(head: DraftHead, hidden: Tensor) -> Tensor:
    return head.to_target_ids(head.logits(hidden).argmax(-1))
