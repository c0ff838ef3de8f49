"""What the runner asks of a target model.

Owns the contract: packed rows in, hidden states and the drafter's taps out, logits only for the rows that need them.
Refuses to know families (`registry`), scheduling and sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peagle.attention.metadata import AttentionMetadata
from peagle.kv_cache.storage import KVStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGeometry:
    """The numbers that the rest of the engine needs of a target."""

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """Result of one pass over packed rows."""

    hidden: Tensor  # [num_rows, hidden_size], after the final norm
    features: Tensor | None  # [num_rows, num_taps * hidden_size]; None when nothing is tapped


class TargetModel(Protocol):
    """A causal language model over packed rows and paged keys and values."""

    geometry: TargetGeometry
    dtype: torch.dtype  # of hidden states and queries

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, storage: KVStorage
    ) -> TargetOutput:
        """Run every layer over the rows, writing their keys and values.

        Args:
            input_ids: [num_rows] int64.
            positions: absolute positions, [num_rows] int64.
            metadata: layout of the rows.
            storage: the pool that `metadata` points into.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of selected rows: [num_selected, hidden_size] -> [num_selected, vocab_size]."""
        ...
