"""Rule R1: draw each row's token from the target, accept a draft exactly when it is the token drawn before it.

Terms: row i of a sequence is the one whose input is draft i (row 0: the last known token), so its token stands where
draft i + 1 was proposed. *Accepted* drafts are those before the first that differs; the token drawn there is the
*recovered* token, or the *bonus* token if all drafts were accepted. Every emitted token was drawn from the full target
distribution with noise keyed by (seed, position), never from a draft; hence the tokens are those of plain decoding, for
any drafts whatsoever, and K = 0 is plain decoding. For a chain of deterministic drafts no lossless rule accepts more.

Owns the comparison. Refuses to sample, and to know sequences: it proposes what to commit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.verifier.layout import NO_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyResult:
    """What B sequences emit."""

    num_accepted_tokens: Tensor  # [B] int64, accepted drafts alone
    output_token_ids: Tensor  # [B, K + 1] int64: accepted drafts, recovered or bonus token, then -1
    is_valid: Tensor  # [B] bool; False if an emitted token was drawn from no distribution


def verify(sampled_token_ids: Tensor, draft_token_ids: Tensor, is_valid: Tensor | None = None) -> VerifyResult:
    """Compare drafts with the tokens drawn from the target.

    Args:
        sampled_token_ids: [B, K + 1] int64; entries past a sequence's drafts are not read.
        draft_token_ids: [B, K] int64, padded with -1.
        is_valid: [B, K + 1] bool, whether a row had a distribution; None if all had.
    """
    num_drafts = draft_token_ids.shape[1]
    matches = (draft_token_ids == sampled_token_ids[:, :num_drafts]) & (draft_token_ids != NO_TOKEN)
    num_accepted = matches.long().cumprod(1).sum(1)  # [B]
    columns = torch.arange(num_drafts + 1, device=sampled_token_ids.device)
    is_emitted = columns <= num_accepted[:, None]  # [B, K + 1]
    if is_valid is None:
        is_valid = torch.ones_like(is_emitted)
    return VerifyResult(
        num_accepted_tokens=num_accepted,
        output_token_ids=torch.where(is_emitted, sampled_token_ids, NO_TOKEN),
        is_valid=(is_valid | ~is_emitted).all(1),
    )
