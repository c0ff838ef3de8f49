"""Linear layers whose weights are stored in half precision and multiplied in float32.

Decoding on a CPU is bound by reading weights. FBGEMM keeps them as packed fp16, converts them in registers and
accumulates in float32: half the bytes, float32 arithmetic, and, what matters most here, each row's result does not
depend on the other rows of the batch, to the last bit (`tests/unit/peagle/layers/test_linear.py`). Dynamic int8 would
be smaller, but it scales activations over the whole batch, so that one request could change another's tokens.

With AVX-512 that holds for any number of rows. With AVX2 FBGEMM multiplies tiles of one or two rows in another order
than larger ones, so that a verified row would differ in its last bits from the same row decoded alone: rows are padded
to a number at which no such tile is used (`even_row_count`).

Owns packing, and which numbers of rows are exact. Refuses to decide who is packed (`models.loader`).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from peagle.errors import ModelLoadError

FP16_MAX = 65504.0

_PROBE_FEATURES = 64
_PROBE_ROWS = 84  # whole tiles of 6 rows (AVX2) and of 14 (AVX-512)
_MOST_PADDING = 8  # FBGEMM with AVX2 needs 2


class PackedLinear(nn.Module):
    """A linear layer with packed fp16 weights and float32 arithmetic, CPU only.

    Args:
        weight: [out_features, in_features]; rounded to fp16, which changes nothing if it was fp16 before,
            and nothing but the last bits of weights below 6e-5 if it was bfloat16.
        bias: [out_features] or None; stays float32.

    Raises:
        ModelLoadError: a weight is too large for fp16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        if float(weight.abs().max()) > FP16_MAX:
            raise ModelLoadError("a weight is too large for packed fp16 storage; load the model with --dtype float32")
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def forward(self, rows: Tensor) -> Tensor:
        """Product of float32 rows [..., in_features] with the weights: [..., out_features]."""
        num_rows = rows.numel() // self.in_features
        padded = pad_to_even(rows.reshape(num_rows, self.in_features)) if num_rows else rows
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(padded, self._packed)
        return output if output.shape[:-1] == rows.shape[:-1] else output[:num_rows].view(*rows.shape[:-1], -1)


def pad_to_even(rows: Tensor) -> Tensor:
    """Rows [num_rows >= 1, features], followed by copies of the last one up to `even_row_count`."""
    num_rows = rows.shape[0]
    padding = even_row_count(num_rows) - num_rows
    return rows if padding == 0 else torch.cat([rows, *[rows[-1:]] * padding])


@cache
def even_row_count(num_rows: int) -> int:
    """Least number of rows, `num_rows` or above, at which a packed product gives every row the same bits.

    Measured on this processor, once for each number: equal rows must have equal products, those of whole tiles. Where
    no number is found, `num_rows`.
    """
    packed, row, wanted = _probe()
    for count in range(num_rows, num_rows + _MOST_PADDING):
        products = torch.ops.quantized.linear_dynamic_fp16(row.repeat(count, 1), packed)
        if torch.equal(products, wanted.expand_as(products)):
            return count
    return num_rows


@cache
def _probe() -> tuple[object, Tensor, Tensor]:
    """A packed weight, a row [1, _PROBE_FEATURES], and the row's product in whole tiles, [_PROBE_FEATURES]."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_PROBE_FEATURES, _PROBE_FEATURES, generator=generator)
    row = torch.randn(1, _PROBE_FEATURES, generator=generator)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return packed, row, torch.ops.quantized.linear_dynamic_fp16(row.repeat(_PROBE_ROWS, 1), packed)[0]


def fuse_linears(linears: list[nn.Linear]) -> nn.Linear:
    """One linear layer that gives the concatenated outputs of several with the same input."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    assert len({bias is None for bias in biases}) == 1, "either all layers have a bias, or none"
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=biases[0] is not None, device="meta")
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if biases[0] is not None:
        fused.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return fused


def pack_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` below `module` with a `PackedLinear`, in place."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight.detach(), child.bias))
        else:
            pack_linears(child)
