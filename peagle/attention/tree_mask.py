"""Which keys the rows of a tree see: all that was committed before it, their ancestors, and themselves.

Rows of a sequence are numbered as they are packed: row 0 is the first one, and every other row names the row before it
in the text (`parent_rows`). A chain is the tree in which that is always the row above. Keys lie in the order of rows,
row i's in slot first position + i, so that no two share one; positions go by depth, and siblings share theirs. A
sliding window counts positions, so it reaches equally far up from every row of one depth.

Padding rows name row 0. Then they see a key, as softmax needs, and nobody sees theirs.

Owns the masks. Refuses to know blocks and tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def node_parent_rows(parents: Tensor) -> Tensor:
    """Parent rows of a root and the nodes below it: [N, B + 1], -1 for row 0.

    Args:
        parents: [N, B] int64, node before each node, or -1 for the root (and for padding).
    """
    return torch.nn.functional.pad(parents + 1, (1, 0), value=-1)


def lineage(parent_rows: Tensor) -> Tensor:
    """Whether row j is an ancestor of row i or i itself: [N, W, W] bool, i before j.

    Args:
        parent_rows: [N, W] int64, -1 for row 0.
    """
    width = parent_rows.shape[1]
    rows = torch.arange(width, device=parent_rows.device)
    up = (parent_rows[..., None] == rows) | (rows[:, None] == rows)  # one step, or none
    steps = 1
    while steps < width - 1:  # two ways up, one after the other, are as long as both
        up = (up.float() @ up.float()) > 0
        steps *= 2
    return up


def tree_positions(first_positions: Tensor, parent_rows: Tensor) -> Tensor:
    """Absolute positions of the rows, first position + depth: [N, W] int64.

    Args:
        first_positions: [N] int64, of row 0.
        parent_rows: [N, W] int64, -1 for row 0.
    """
    return first_positions[:, None] + lineage(parent_rows).sum(-1) - 1


def visible_keys(positions: Tensor, parent_rows: Tensor, *, num_keys: int, sliding_window: int | None = None) -> Tensor:
    """Whether row i sees the key in slot j: [N, W, num_keys] bool.

    Args:
        positions: [N, W] int64; that of row 0 is also the slot of its key, and the number of committed keys.
        parent_rows: [N, W] int64, -1 for row 0.
        num_keys: slots of a sequence.
        sliding_window: positions that a row sees at most, its own included; None for all.
    """
    width = positions.shape[1]
    family = lineage(parent_rows)  # [N, W, W]
    keys = torch.arange(num_keys, device=positions.device)
    committed = (keys < positions[:, :1])[:, None]  # [N, 1, num_keys]
    if sliding_window is not None:
        own = positions[:, :, None]
        family = family & (positions[:, None] > own - sliding_window)
        committed = committed & (keys > own - sliding_window)  # [N, W, num_keys]
    rows = keys - positions[:, :1]  # [N, num_keys], which row's key it is
    is_row = (rows >= 0) & (rows < width)
    index = rows.clamp(0, width - 1)[:, None].expand(-1, width, -1)
    return committed | (family.gather(2, index) & is_row[:, None])
