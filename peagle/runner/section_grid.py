"""A section of a step on the device, and the query groups that attention takes it in.

Owns the cut of a grid into spans. Refuses to know what the rows hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.attention.metadata import QueryGroup
from peagle.cuda_graphs.buckets import GridShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionGrid:
    """A grid of rows; see `input_batch.Section`."""

    shape: GridShape
    first_row: int
    positions: Tensor  # [num_seqs * width]
    block_tables: Tensor  # [num_seqs, largest num_blocks]
    parent_rows: Tensor | None  # [num_seqs * width]; None where all drafts are chains

    def query_groups(self, *, block_size: int, dtype: torch.dtype) -> list[QueryGroup]:
        """One group for each span.

        Args:
            block_size: tokens in a block.
            dtype: of the queries.
        """
        size = (self.shape.num_seqs, self.shape.width)
        positions = self.positions.view(size)
        parents = None if self.parent_rows is None else self.parent_rows.view(size)
        groups, first_seq = [], 0
        for span in self.shape.spans:
            last_seq = first_seq + span.num_seqs
            groups.append(
                QueryGroup(
                    first_row=self.first_row + first_seq * self.shape.width,
                    positions=positions[first_seq:last_seq],
                    block_tables=self.block_tables[first_seq:last_seq, : span.num_blocks],
                    block_size=block_size,
                    dtype=dtype,
                    parent_rows=None if parents is None else parents[first_seq:last_seq],
                )
            )
            first_seq = last_seq
        return groups
