"""A draft pass on the device: the tensors of what was laid out on the host.

Owns the crossing. Refuses to know what the rows mean (`inputs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.drafter.inputs import DraftInputs, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTensors:
    """`DraftInputs` on the device."""

    token_ids: Tensor  # [T] int64
    feature_rows: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionMetadata
    logits_rows: Tensor  # [D, K] int64


def to_tensors(inputs: DraftInputs, *, block_size: int, dtype: torch.dtype, device: torch.device) -> DraftTensors:
    """Copy inputs to a device.

    Args:
        inputs: of a pass.
        block_size: of the head's pool.
        dtype: the head's float type.
        device: the head's.
    """
    groups = tuple(
        QueryGroup(
            first_row=grid.first_row,
            positions=to_device(grid.positions, device),
            block_tables=to_device(grid.block_tables, device),
            block_size=block_size,
            dtype=dtype,
        )
        for grid in inputs.grids
    )
    return DraftTensors(
        token_ids=to_device(inputs.token_ids, device),
        feature_rows=to_device(inputs.feature_rows, device),
        positions=to_device(flat_positions(inputs), device),
        attention=AttentionMetadata(slot_mapping=to_device(inputs.slot_mapping, device), groups=groups),
        logits_rows=to_device(inputs.logits_rows, device),
    )


def flat_positions(inputs: DraftInputs) -> IntArray:
    """Position of each row, [T]."""
    positions = [grid.positions.ravel() for grid in inputs.grids]
    return np.concatenate(positions) if positions else np.empty(0, dtype=np.int64)


def to_device(array: IntArray, device: torch.device) -> Tensor:
    """A copy on the device, on its way."""
    return torch.from_numpy(array).to(device, non_blocking=True)
