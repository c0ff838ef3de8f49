"""Ragged rows of verification as one padded grid, [num_seqs, K + 1].

Owns the padding: missing drafts are -1, which no token equals, and missing rows repeat the sequence's last one, which
is never read. Refuses to know what the rows hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NO_TOKEN = -1


def padded_drafts(draft_token_ids: Sequence[Sequence[int]], *, device: torch.device | str = "cpu") -> Tensor:
    """The drafts of each sequence, [num_seqs, K] int64 with K the most that a sequence has."""
    width = max((len(drafts) for drafts in draft_token_ids), default=0)
    padded = [[*drafts, *[NO_TOKEN] * (width - len(drafts))] for drafts in draft_token_ids]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(padded), width)


def padded_rows(num_drafts: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
    """Which packed row is row i of each sequence, [num_seqs, K + 1] int64.

    Args:
        num_drafts: drafts of each sequence; its packed rows are one more.
        device: of the result.
    """
    width = max(num_drafts, default=0) + 1
    first, padded = 0, []
    for num in num_drafts:
        padded.append([first + min(i, num) for i in range(width)])
        first += num + 1
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(padded), width)
