"""Packed and fused linears. Rows must not see each other: that is what lets batches form freely."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peagle.errors import ModelLoadError
from peagle.layers.linear import PackedLinear, even_row_count, fuse_linears, pack_linears, pad_to_even

SHAPES = [(960, 576), (3072, 576), (576, 1536)]  # SmolLM2-135M: out_features, in_features


def random_weight(shape: tuple[int, int], *, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_the_batch(shape: tuple[int, int]) -> None:
    linear = PackedLinear(random_weight(shape), random_weight((1, shape[0]))[0])
    rows = torch.randn(40, shape[1], generator=torch.Generator().manual_seed(1))
    alone = torch.cat([linear(rows[i : i + 1]) for i in range(40)])
    for num_rows in range(1, 41):
        assert linear(rows[:num_rows]).shape == (num_rows, shape[0])
        assert torch.equal(linear(rows[:num_rows]), alone[:num_rows])
        assert torch.equal(linear(rows[40 - num_rows :]), alone[40 - num_rows :])
    wild = rows.clone()
    wild[1::2] = 1e30
    wild[2::4] = float("nan")
    assert torch.equal(linear(wild)[::4], alone[::4])


def test_long_chunks_have_the_bits_of_single_rows_too() -> None:
    """Every remainder that FBGEMM's blocks of 120 rows can leave."""
    linear = PackedLinear(random_weight((64, 64)))
    rows = torch.randn(260, 64, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([linear(rows[i : i + 1]) for i in range(260)])
    for num_rows in range(41, 261):
        assert torch.equal(linear(rows[:num_rows]), alone[:num_rows])


def test_padding_repeats_the_last_row_and_is_little() -> None:
    rows = torch.randn(500, 4, generator=torch.Generator().manual_seed(1))
    for num_rows in range(1, 501):
        padded = pad_to_even(rows[:num_rows])
        assert len(padded) == even_row_count(num_rows) == even_row_count(len(padded))
        assert num_rows <= len(padded) <= num_rows + 2
        assert torch.equal(padded[:num_rows], rows[:num_rows])
        assert (padded[num_rows:] == rows[num_rows - 1]).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_arithmetic_is_float32_on_rounded_weights(shape: tuple[int, int], has_bias: bool) -> None:
    weight = random_weight(shape)
    bias = random_weight((1, shape[0]), seed=2)[0] if has_bias else None
    rows = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1))
    wanted = rows.double() @ weight.half().double().T
    if bias is not None:
        wanted = wanted + bias.double()
    got = PackedLinear(weight, bias)(rows)
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_half_precision_weights_are_kept_as_they_are() -> None:
    weight = random_weight((32, 16)).half()
    rows = torch.eye(16)
    assert torch.equal(PackedLinear(weight)(rows), weight.float().T)


def test_rows_may_lie_apart_and_may_be_none() -> None:
    linear = PackedLinear(random_weight((24, 16)))
    wide = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear(wide[:, 8:24]), linear(wide[:, 8:24].contiguous()))
    assert linear(wide[:0, :16]).shape == (0, 24)
    assert torch.equal(linear(wide[None, :, :16])[0], linear(wide[:, :16]))


@pytest.mark.parametrize("value", [70000.0, -70000.0, float("inf")])
def test_weights_beyond_fp16_are_refused(value: float) -> None:
    weight = random_weight((8, 8))
    weight[3, 4] = value
    with pytest.raises(ModelLoadError, match="float32"):
        PackedLinear(weight)


@pytest.mark.parametrize("has_bias", [False, True])
def test_fused_linears_equal_the_separate_ones(has_bias: bool) -> None:
    """Small whole numbers: their sums are exact in any order, so that only a wrong weight can make a difference."""
    torch.manual_seed(0)
    linears = [nn.Linear(12, size, bias=has_bias) for size in (7, 3, 5)]
    for linear in linears:
        for parameter in linear.parameters():
            parameter.data = torch.randint(-9, 10, parameter.shape).float()
    rows = torch.randint(-9, 10, (4, 12)).float()
    wanted = torch.cat([linear(rows) for linear in linears], -1)
    fused = fuse_linears(linears)
    assert torch.equal(fused(rows), wanted)
    assert not any(parameter.requires_grad for parameter in fused.parameters())
    assert torch.equal(PackedLinear(fused.weight, fused.bias)(rows), wanted)


def test_every_linear_of_a_module_is_packed_in_place() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.SiLU(), nn.Linear(8, 5, bias=False)), nn.LayerNorm(5))
    for parameter in module.parameters():
        parameter.data = parameter.data.half().float()
    rows = torch.randn(3, 6)
    wanted = module(rows)
    pack_linears(module)
    assert [type(layer) for layer in module.modules() if isinstance(layer, (nn.Linear, PackedLinear))] == [
        PackedLinear,
        PackedLinear,
    ]
    assert torch.allclose(module(rows), wanted, rtol=1e-5, atol=1e-6)
