"""Rule R1 as one would decode by hand: go on while the draft is what the target drew. Slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence


def reference_verify(sampled_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> list[int]:
    """Tokens that one sequence emits: accepted drafts, then the recovered or bonus token."""
    emitted = []
    for i, token_id in enumerate(sampled_token_ids):
        emitted.append(token_id)
        if i == len(draft_token_ids) or draft_token_ids[i] != token_id:
            break
    return emitted
