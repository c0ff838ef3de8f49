"""Named input tensors that never move, because a captured graph reads the addresses that it saw.

Owns the memory and the rule that shapes are views of it. Refuses to know what the names mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = NDArray[np.int64] | Tensor


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Largest shape and element type of a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StaticBuffers:
    """One flat tensor for each name; views of its start serve every shape."""

    def __init__(self, specs: Mapping[str, BufferSpec], device: torch.device) -> None:
        self._flat = {
            name: torch.zeros(int(np.prod(spec.shape)), dtype=spec.dtype, device=device) for name, spec in specs.items()
        }

    def view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The buffer as a tensor of `shape`, which must not be larger than its specification."""
        size = int(np.prod(shape))
        return self._flat[name][:size].view(shape)

    def fill(self, values: Mapping[str, Values]) -> dict[str, Tensor]:
        """Copy values in, from the host or the device; returns the views that hold them."""
        views = {}
        for name, value in values.items():
            view = self.view(name, tuple(value.shape))
            view.copy_(torch.as_tensor(value))
            views[name] = view
        return views
