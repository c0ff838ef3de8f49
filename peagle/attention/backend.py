"""The seam between models and attention kernels.

Owns the signature that every backend implements. Refuses to know any kernel; `sdpa` is the portable one,
`reference` the obvious one that tests compare it with.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from peagle.attention.metadata import AttentionMetadata
from peagle.kv_cache.storage import LayerCache


class AttentionBackend(Protocol):
    """Writes the rows' keys and values into the cache, then attends over the paged context."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        *,
        scaling: float,
        sliding_window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention output of each row, [num_rows, num_heads, head_dim].

        Args:
            query: [num_rows, num_heads, head_dim], rotated.
            key: [num_rows, num_kv_heads, head_dim], rotated; num_heads is a multiple of num_kv_heads.
            value: [num_rows, num_kv_heads, head_dim].
            cache: this layer's blocks.
            metadata: layout of the step.
            scaling: factor on the scores.
            sliding_window: keys that a row sees at most, itself included; None for all.
            sinks: a score for each head that takes part in the softmax but carries no value (GPT-OSS), [num_heads].
        """
        ...
