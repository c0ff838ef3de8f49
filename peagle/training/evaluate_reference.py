"""Speculative decoding as one would write it down: no cache, nothing computed ahead. Slow on purpose.

The truth that `evaluate` is compared with. Owns nothing but the definition.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peagle.drafter.head import DraftHead
from peagle.drafter.reference import reference_drafts
from peagle.training.acceptance import AcceptanceCounts
from peagle.training.target_answers import trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceDecode:
    """A decoded answer, and how its rounds went."""

    answer_token_ids: tuple[int, ...]
    counts: AcceptanceCounts


def reference_decode(
    model: Any,
    head: DraftHead,
    prompt: Sequence[int],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    end_token_ids: Collection[int],
) -> ReferenceDecode:
    """Answer a prompt greedily with drafts; model and head on the CPU."""
    committed = [*prompt, _next_token(model, prompt)]
    checked, accepted = [0] * num_speculative_tokens, [0] * num_speculative_tokens
    num_rounds = 0

    def is_done() -> bool:
        return committed[-1] in end_token_ids or len(committed) == len(prompt) + max_new_tokens

    while not is_done():
        features = trace(model, torch.tensor(committed[:-1]), head.config.aux_layer_ids).features
        logits = reference_drafts(head, committed, features, num_speculative_tokens).logits
        drafts = head.to_target_ids(logits.argmax(-1)).tolist()
        num_rounds += 1
        for depth, draft in enumerate([*drafts, None]):  # after the last draft comes the target's own token
            token = _next_token(model, committed)
            committed.append(token)
            if draft is not None:
                checked[depth] += 1
            if draft != token:
                break
            accepted[depth] += 1
            if is_done():
                break
    counts = AcceptanceCounts(
        num_rounds=num_rounds,
        num_tokens=len(committed) - len(prompt) - 1,
        num_checked=tuple(checked),
        num_accepted=tuple(accepted),
    )
    return ReferenceDecode(answer_token_ids=tuple(committed[len(prompt) :]), counts=counts)


def _next_token(model: Any, token_ids: Sequence[int]) -> int:
    return int(trace(model, torch.tensor(token_ids), (0,)).next_token_ids[-1])
