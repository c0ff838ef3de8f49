"""Paged attention spelled out: one row, one head, one key at a time. The truth that `sdpa` is compared with.

Slow on purpose. Owns nothing but the definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.kv_cache.storage import LayerCache


class ReferenceAttention:
    """See `AttentionBackend`."""

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
        """Attention output of each row, [num_rows, num_heads, head_dim]."""
        cache.write(key, value, metadata.slot_mapping)
        output = torch.zeros_like(query)
        for group in metadata.groups:
            for row in range(group.num_rows):
                keys, values = _visible(cache, group, row, sliding_window, query.dtype)
                for head in range(query.shape[1]):
                    kv_head = head * keys.shape[1] // query.shape[1]
                    scores = keys[:, kv_head] @ query[group.first_row + row, head] * scaling  # [num_visible]
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head : head + 1].to(scores.dtype)])
                    weights = scores.softmax(0)[: len(keys)]
                    output[group.first_row + row, head] = weights @ values[:, kv_head]
        return output


def _visible(
    cache: LayerCache, group: QueryGroup, row: int, sliding_window: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values that a row of a group sees, each [num_visible, num_kv_heads, head_dim]."""
    seq, offset = divmod(row, group.width)
    if group.parent_rows is None:
        position = int(group.positions[seq, offset])
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        visible = list(range(first, position + 1))
    else:
        visible = _path(group.parent_rows[seq].tolist(), offset, int(group.positions[seq, 0]))
        visible = [slot for slot in visible if slot < group.num_keys]  # a padding row may have none of its own
        visible = visible if sliding_window is None else visible[-sliding_window:]
    blocks = [int(group.block_tables[seq, j // group.block_size]) for j in visible]
    offsets = [j % group.block_size for j in visible]
    return cache.key[blocks, offsets].to(dtype), cache.value[blocks, offsets].to(dtype)


def _path(parent_rows: list[int], row: int, num_committed: int) -> list[int]:
    """Slots of the text that ends in a row of a tree: what was committed, then the row's ancestors and itself."""
    own = []
    while row >= 0:
        own.append(num_committed + row)
        row = parent_rows[row]
    return [*range(num_committed), *reversed(own)]
