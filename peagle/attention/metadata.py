"""What the rows of a step attend to, as an argument of the forward pass.

A step's rows are packed along one axis and fall into groups; in a group every sequence has the same number of rows
(`width`), so that a group is a grid [num_seqs, width]. A batch of decodes is one grid, a chunk of a prefill is a grid
with one sequence. One rule covers all of them: the key at absolute position j of a sequence lies in slot
`block_table[j // block_size] * block_size + j % block_size`, and a row at position p sees the keys j <= p (and, in a
layer with a sliding window w, j > p - w). The one exception is a group whose rows are trees (`tree_mask`).

Owns the layout and the masks made from it (once a step, shared by all layers). Refuses to know models and drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.attention.tree_mask import visible_keys


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryGroup:
    """Sequences with the same number of rows. Rows are [first_row, first_row + num_seqs * width).

    Padding rows have position 0 and the null slot: they see a key, write nowhere and nobody reads their output.
    """

    first_row: int
    positions: Tensor  # [num_seqs, width] int64
    block_tables: Tensor  # [num_seqs, num_blocks] int64, padded with any valid block
    block_size: int
    dtype: torch.dtype  # of the masks: the dtype of the queries
    parent_rows: Tensor | None = None  # [num_seqs, width] int64 where rows are trees; None where they are chains
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _row_masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        """Sequences in the grid."""
        return self.positions.shape[0]

    @property
    def width(self) -> int:
        """Rows of each sequence."""
        return self.positions.shape[1]

    @property
    def num_rows(self) -> int:
        """Rows of the grid."""
        return self.positions.numel()

    @property
    def num_keys(self) -> int:
        """Keys that are gathered for each sequence, visible or not."""
        return self.block_tables.shape[1] * self.block_size

    def mask(self, sliding_window: int | None) -> Tensor:
        """Additive mask, 0 where a row sees a key and -inf elsewhere: [num_seqs, 1, width, num_keys]."""
        mask = self._masks.get(sliding_window)
        if mask is None:
            mask = self._masks[sliding_window] = self._build_mask(sliding_window)
        return mask

    def mask_of_rows(self, sliding_window: int | None, num_heads: int) -> Tensor:
        """The mask for rows that are laid out as heads: [num_seqs, num_heads * width, 1, num_keys]."""
        mask = self.mask(sliding_window)
        if self.width == 1:
            return mask  # broadcasts over the heads
        rows = self._row_masks.get(sliding_window)
        if rows is None:
            rows = self._row_masks[sliding_window] = mask.expand(-1, num_heads, -1, -1).flatten(1, 2).unsqueeze(2)
        return rows

    def _build_mask(self, sliding_window: int | None) -> Tensor:
        is_hidden = self._hidden_keys(sliding_window)
        mask = torch.zeros(is_hidden.shape, dtype=self.dtype, device=is_hidden.device)
        return mask.masked_fill_(is_hidden, float("-inf"))

    def _hidden_keys(self, sliding_window: int | None) -> Tensor:
        """Whether a row does not see a key: [num_seqs, 1, width, num_keys] bool."""
        if self.parent_rows is not None:
            visible = visible_keys(
                self.positions, self.parent_rows, num_keys=self.num_keys, sliding_window=sliding_window
            )
            return ~visible[:, None]
        keys = torch.arange(self.num_keys, device=self.positions.device)  # [num_keys]
        rows = self.positions[:, None, :, None]  # [num_seqs, 1, width, 1]
        is_hidden = keys > rows  # [num_seqs, 1, width, num_keys]
        if sliding_window is not None:
            is_hidden = is_hidden | (keys <= rows - sliding_window)
        return is_hidden


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMetadata:
    """All groups of a step, in row order, and where each row's key and value are written."""

    slot_mapping: Tensor  # [num_rows] int64, null slot for rows that write nowhere
    groups: tuple[QueryGroup, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.slot_mapping.shape[0]
