"""Every draft of a whole answer that a decode could look at, without decoding it.

A greedy draft depends on the committed tokens and on nothing that was drafted or rejected before. So the drafts after
each token of a known answer are computed depth by depth, each depth for all places together: a slot sees the real
slots up to its anchor, and the further slots of its own chain (the attention rule of training, peagle.md 3.3, without
dropped tokens). Nobody looks behind a wrong draft, so chains end there, and most end early. Owns this pass. Refuses to
know how an answer came about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.training.chain_attention import ChainAttention

NOT_DRAFTED = -1  # behind a wrong draft, and behind the end of the answer

# feed(drafts [A], hidden [A, H]) -> token ids [A] and fused features [A, H] of the slots that follow
Feed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


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
        """Drafts after each token of an answer but the last, [R - 1, K], `NOT_DRAFTED` where nobody would look."""
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

    Returns:
        Drafts up to the first wrong one of each place, `NOT_DRAFTED` behind it and where the answer has ended.
    """
    mask_id = head.config.mask_token_id
    assert mask_id is not None  # a head without a mask drafts in turn
    fused_mask = head.fused_mask()  # [H]

    def feed(drafts: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(drafts, mask_id), fused_mask.expand(len(hidden), -1)

    attend, hidden = _read_slots(head, token_ids, features, num_prompt_tokens)
    drafts = _empty_drafts(hidden, num_speculative_tokens)
    _draft_while_right(head, attend, hidden, feed=feed, answer=token_ids[num_prompt_tokens:], drafts=drafts)
    return drafts


@torch.no_grad()
def draft_answer_in_turn(
    head: DraftHead, token_ids: Tensor, features: Tensor, *, num_prompt_tokens: int, num_speculative_tokens: int
) -> Tensor:
    """As `draft_answer`, for a head that drafts one token after the other, as EAGLE-3 does.

    A further slot has the draft before it as its token, and the head's own hidden state (`feed_back`) as its feature
    (arXiv 2503.01840).
    """

    def feed(drafts: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return drafts, head.feed_back(hidden)

    attend, hidden = _read_slots(head, token_ids, features, num_prompt_tokens)
    drafts = _empty_drafts(hidden, num_speculative_tokens)
    _draft_while_right(head, attend, hidden, feed=feed, answer=token_ids[num_prompt_tokens:], drafts=drafts)
    return drafts


def _empty_drafts(hidden: Tensor, num_speculative_tokens: int) -> Tensor:
    return torch.full((len(hidden), num_speculative_tokens), NOT_DRAFTED, device=hidden.device)


def _draft_while_right(
    head: DraftHead, attend: ChainAttention, hidden: Tensor, *, feed: Feed, answer: Tensor, drafts: Tensor
) -> None:
    """Fill in drafts [R - 1, K], depth by depth: place i, depth d stands for `answer[i + d + 1]`."""
    places = torch.arange(len(drafts), device=drafts.device)
    for depth in range(drafts.shape[1]):
        if depth:
            tokens, fused = feed(answer[places + depth], hidden)  # the drafts before were right
            hidden = head(tokens, fused, attend.anchors + depth, attend)
        drafts[places, depth] = _likeliest(head, hidden)
        has_next = places + depth + 2 < len(answer)
        is_right = drafts[places, depth] == answer[places + depth + 1]
        goes_on = has_next & is_right
        if not bool(goes_on.any()):
            return
        places, hidden = places[goes_on], hidden[goes_on]
        attend.keep(goes_on)


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
