"""Paged attention with torch's scaled_dot_product_attention: the portable backend, and the fast one on CPU.

Each group gathers its blocks into one padded tensor (measured on two CPU cores: gathering whole blocks of 16 sequences
with 256 keys takes 90 us, attention over them 200 us, half of what a loop over sequences takes) and attends with the
group's mask.

On CPU, the few rows of a decoding sequence are attended to as if each were a head of its own, one query long. A matrix
product with five rows rounds differently from one with a single row, so that a verified row would differ in its last
bits from the same row of plain decoding; as heads, every row goes through the same kernel at the same shape, whatever
K and the batch are. Together with linears whose rows do not depend on each other this makes verification exact to the
last bit (`tests/integration/test_bit_exact.py`), for a third more time in attention at K = 4. It needs MKL to ignore
how buffers happen to be aligned, which is what `MKL_CBWR=AUTO` asks for.

Owns the gather, its scratch memory and the shapes of the calls. Refuses to know models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.kv_cache.storage import LayerCache, as_copied
from peagle.spec_config import MAX_NUM_SPECULATIVE_TOKENS

# Wider grids are chunks of prompts, for which a matrix product is several times faster.
_MAX_ROWS_AS_HEADS = MAX_NUM_SPECULATIVE_TOKENS + 1


class SdpaAttention:
    """See `AttentionBackend`. One instance serves all layers of a model, one call at a time."""

    def __init__(self) -> None:
        self._scratch: dict[str, Tensor] = {}

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
        if len(metadata.groups) == 1:
            return self._attend(query, cache, metadata.groups[0], scaling, sliding_window, sinks)
        parts = []
        for group in metadata.groups:
            rows = query[group.first_row : group.first_row + group.num_rows]
            parts.append(self._attend(rows, cache, group, scaling, sliding_window, sinks))
        return torch.cat(parts)

    def _attend(
        self,
        query: Tensor,
        cache: LayerCache,
        group: QueryGroup,
        scaling: float,
        sliding_window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        num_heads, head_dim = query.shape[1:]
        grid = query.view(group.num_seqs, group.width, num_heads, head_dim).transpose(1, 2)
        keys = self._gather("key", cache.key, group, query.dtype)  # [num_seqs, num_kv_heads, num_keys, head_dim]
        values = self._gather("value", cache.value, group, query.dtype)
        mask = group.mask(sliding_window)  # [num_seqs, 1, width, num_keys]
        if sinks is not None:
            output = _attend_with_sinks(grid, keys, values, mask, scaling, sinks)
        elif query.is_cuda or group.width > _MAX_ROWS_AS_HEADS:
            output = F.scaled_dot_product_attention(grid, keys, values, mask, scale=scaling, enable_gqa=True)
        else:
            rows = grid.reshape(group.num_seqs, num_heads * group.width, 1, head_dim)  # width varies fastest
            row_mask = group.mask_of_rows(sliding_window, num_heads)
            output = F.scaled_dot_product_attention(rows, keys, values, row_mask, scale=scaling, enable_gqa=True)
            output = output.view(group.num_seqs, num_heads, group.width, head_dim)
        return output.transpose(1, 2).reshape(-1, num_heads, head_dim)

    def _gather(self, name: str, blocks: Tensor, group: QueryGroup, dtype: torch.dtype) -> Tensor:
        """The group's context, [num_seqs, num_kv_heads, num_keys, head_dim]."""
        num_kv_heads, head_dim = blocks.shape[2:]
        table = group.block_tables.flatten()  # [num_seqs * num_blocks]
        if blocks.is_cuda:  # a captured graph owns its own memory; there is nothing to reuse
            gathered = as_copied(blocks).flatten(1).index_select(0, table)
        else:
            # Fresh memory for every layer would be paid for in page faults: the scratch is kept and only grows.
            gathered = self._scratch_rows(name, as_copied(blocks), table.shape[0])
            torch.index_select(as_copied(blocks).flatten(1), 0, table, out=gathered)
        context = gathered.view(blocks.dtype).view(group.num_seqs, group.num_keys, num_kv_heads, head_dim)
        return context.transpose(1, 2).to(dtype)

    def _scratch_rows(self, name: str, blocks: Tensor, num_rows: int) -> Tensor:
        width = blocks[0].numel()
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < num_rows * width or scratch.dtype != blocks.dtype:
            scratch = self._scratch[name] = torch.empty(num_rows * width, dtype=blocks.dtype)
        return scratch[: num_rows * width].view(num_rows, width)


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, sinks: Tensor
) -> Tensor:
    """Attention whose softmax has one more term per head, without a value: [num_seqs, num_heads, width, head_dim]."""
    num_seqs, num_heads, width, _ = query.shape
    num_groups = num_heads // key.shape[1]
    key = key.repeat_interleave(num_groups, 1)  # [num_seqs, num_heads, num_keys, head_dim]
    value = value.repeat_interleave(num_groups, 1)
    scores = query @ key.transpose(2, 3) * scaling + mask  # [num_seqs, num_heads, width, num_keys]
    sink_scores = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(num_seqs, num_heads, width, 1)
    weights = torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1]
    return weights @ value
