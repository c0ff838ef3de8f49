"""The tensors behind KV blocks.

Owns memory: one key and one value tensor per layer, and a null block that swallows the writes of padding rows.
Refuses to know who uses which block (`block_manager`) and how attention reads them (`attention`). The only file of
this package that imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Shape and type of the cached keys and values of one model."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def block_bytes(self, num_layers: int) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer. The last block is the null block."""

    key: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    value: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store rows in their slots; what is not a finite number becomes 0.

        Attention gives weight 0 to what a row must not see, and 0 times NaN is NaN. So a row that overflowed must not
        leave it behind: a rejected draft, the next owner of the block and whoever is padded with the null block would
        suffer. The row itself is known by its hidden state, and fails its own request (`runner.model_runner`).

        Args:
            key: [num_rows, num_kv_heads, head_dim].
            value: [num_rows, num_kv_heads, head_dim].
            slot_mapping: flat slot of each row, [num_rows] int64; rows that go nowhere carry the null slot.
        """
        slots = self.key.shape[0] * self.key.shape[1]
        for cached, rows in ((self.key, key), (self.value, value)):
            finite = rows.flatten(1).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            if cached.dtype != rows.dtype:
                if torch.finfo(cached.dtype).max < torch.finfo(rows.dtype).max:  # narrowing must not make infinities
                    finite = finite.clamp(torch.finfo(cached.dtype).min, torch.finfo(cached.dtype).max)
                finite = finite.to(cached.dtype)
            as_copied(cached).view(slots, -1).index_copy_(0, slot_mapping, as_copied(finite))

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values to other slots, all at once: a destination may be another one's source.

        Args:
            sources: flat slots, [num_moves] int64.
            destinations: flat slots, [num_moves] int64, all different.
        """
        slots = self.key.shape[0] * self.key.shape[1]
        for cached in (self.key, self.value):
            rows = as_copied(cached).view(slots, -1)
            rows.index_copy_(0, destinations, rows.index_select(0, sources))


def as_copied(tensor: Tensor) -> Tensor:
    """The tensor as a type that can be copied by index: of 8-bit floats, their bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


class KVStorage:
    """One pool of KV blocks over all layers of a model.

    Zeroed at the start, for the reason that `LayerCache.write` gives. On CPU the zeros are the operating system's, so
    that memory is taken as blocks are used and a start does not wait for it.
    """

    def __init__(self, *, num_layers: int, num_blocks: int, geometry: KVGeometry) -> None:
        shape = (num_blocks + 1, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
        self.num_blocks = num_blocks
        self.block_size = geometry.block_size
        self.layers = tuple(LayerCache(_zeros(shape, geometry), _zeros(shape, geometry)) for _ in range(num_layers))

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """As `LayerCache.move`, in all layers."""
        for layer in self.layers:
            layer.move(sources, destinations)

    @property
    def null_block(self) -> int:
        """The block that no sequence owns; the target of padding rows."""
        return self.num_blocks

    @property
    def null_slot(self) -> int:
        """A slot of the null block."""
        return self.num_blocks * self.block_size


def _zeros(shape: tuple[int, ...], geometry: KVGeometry) -> Tensor:
    if geometry.device.type != "cpu":
        return torch.zeros(shape, dtype=geometry.dtype, device=geometry.device)
    num_bytes = math.prod(shape) * geometry.dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(geometry.dtype).view(shape)
