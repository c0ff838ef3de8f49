"""Attention among the elements of a P-EAGLE training pass: densely, and without most of what the mask would hide.

Of the T x T pairs of a pass few are visible: a mask slot sees the real slots up to its anchor, and a handful of its own
chain. With mask slots in the order of their anchors, a block of neighbouring anchors needs only the real slots up to
its last anchor and its own mask slots. Owns both ways, which are equal. Refuses to know where the elements come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.training.cod import Elements
from peagle.training.mask import visible

_BLOCK_ANCHORS = 128  # fewer: more calls; more: more hidden pairs


class DenseAttention:
    """See `head.Attend`: every pair, under the mask of the rule."""

    def __init__(self, elements: Elements, *, scaling: float, device: torch.device) -> None:
        self._visible = visible(elements).to(device)  # [T, T] bool
        self._scaling = scaling

    def __call__(self, _: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, num_heads, head_dim]."""
        q, k, v = _by_head(query, key, value)
        output = F.scaled_dot_product_attention(q, k, v, self._visible, scale=self._scaling, enable_gqa=True)
        return output[0].transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Neighbouring rows. They see some of the first real slots, and some of themselves if they are mask slots."""

    rows: slice
    num_context: int  # real slots that any of them sees
    own: slice  # `rows` for mask slots, nothing for real ones
    bias: Tensor  # [rows, num_context + own] float32, 0 where a row sees and -inf where it does not


class BlockedAttention:
    """See `head.Attend`: rows block by block, each with the keys it needs.

    Args:
        elements: `by_chain`, real slots from 0 on without a gap.
        scaling: of scores.
        device: of the rows.
        block_anchors: neighbouring anchors whose rows are computed together.
    """

    def __init__(
        self, elements: Elements, *, scaling: float, device: torch.device, block_anchors: int = _BLOCK_ANCHORS
    ) -> None:
        num_real = elements.num_real
        assert np.array_equal(elements.anchors[:num_real], np.arange(num_real))
        assert (np.diff(elements.anchors[num_real:]) >= 0).all()
        self._blocks = [_block(elements, rows, device) for rows in _block_rows(elements, block_anchors)]
        self._scaling = scaling

    def __call__(self, _: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, num_heads, head_dim]."""
        q, k, v = (rows[0] for rows in _by_head(query, key, value))  # [heads, T, head_dim]
        outputs: list[Tensor] = []
        for block in self._blocks:
            keys, values = (
                torch.cat([rows[:, : block.num_context], rows[:, block.own]], 1) for rows in (k, v)
            )  # [num_kv_heads, num_context + own, head_dim]
            output = MaskedProduct.apply(q[:, block.rows], keys, values, block.bias, self._scaling)  # type: ignore[no-untyped-call]
            outputs.append(output)  # [num_heads, rows, head_dim]
        return torch.cat(outputs, 1).transpose(0, 1)


class MaskedProduct(torch.autograd.Function):
    """softmax(bias + scaling * query @ key^T) @ value, of which only the weights are kept, in the value's type.

    Blocks are small, so that nothing needs to be computed twice; on a CPU this is faster than flash attention.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
        """[num_heads, m, head_dim] by [num_kv_heads, s, head_dim], under a bias [m, s]: as `query`."""
        num_kv_heads, num_keys, head_dim = key.shape
        grouped = query.reshape(num_kv_heads, -1, head_dim)  # [num_kv_heads, group * m, head_dim]
        scores = (grouped @ key.transpose(-1, -2)).view(num_kv_heads, -1, *bias.shape)
        weights = torch.add(bias, scores, alpha=scaling).softmax(-1).to(value.dtype).view(num_kv_heads, -1, num_keys)
        output = weights @ value  # [num_kv_heads, group * m, head_dim]
        ctx.save_for_backward(grouped, key, value, weights, output)
        ctx.scaling = scaling
        return output.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value."""
        query, key, value, weights, output = ctx.saved_tensors
        of_output = upstream[0].reshape(output.shape).to(value.dtype)
        of_value = weights.transpose(-1, -2) @ of_output
        # The softmax's gradient takes off each row's mean, which is the product of output and its gradient.
        mean = (of_output.to(_wide(value)) * output).sum(-1, keepdim=True)
        of_scores = ((of_output @ value.transpose(-1, -2)) - mean).mul_(weights).mul_(ctx.scaling).to(value.dtype)
        of_key = of_scores.transpose(-1, -2) @ query
        return (of_scores @ key).view(upstream[0].shape), of_key, of_value, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _block_rows(elements: Elements, block_anchors: int) -> list[slice]:
    """Rows of a pass, divided where anchors pass a multiple of `block_anchors`, and where mask slots begin."""
    numbers = elements.anchors // block_anchors
    cuts = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(elements.depths > 0))) + 1
    own_cuts = {elements.num_real, *cuts.tolist()} - {0, len(elements)}
    return [slice(first, end) for first, end in pairwise([0, *sorted(own_cuts), len(elements)])]


def _block(elements: Elements, rows: slice, device: torch.device) -> _Block:
    anchors, depths = torch.from_numpy(elements.anchors[rows]), torch.from_numpy(elements.depths[rows])
    num_context = int(anchors.max()) + 1
    own = rows if int(depths[0]) else slice(0)
    sees_context = torch.arange(num_context) <= anchors[:, None]
    sees_own = visible(Elements(anchors=elements.anchors[rows], depths=elements.depths[rows]))
    is_seen = torch.cat([sees_context, sees_own[:, : own.stop - (own.start or 0)]], -1)
    bias = torch.zeros(is_seen.shape).masked_fill(~is_seen, float("-inf"))
    return _Block(rows=rows, num_context=num_context, own=own, bias=bias.to(device))


def _by_head(*rows: Tensor) -> tuple[Tensor, ...]:
    """Each as [1, heads, T, head_dim], in the type of the last, the value: rotation may have widened the others."""
    return tuple(one.to(rows[-1].dtype).transpose(0, 1)[None] for one in rows)
