"""The tensors behind blocks: where a row lands, what it may leave behind, and how much memory it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kv_cache.storage import KVGeometry, KVStorage


def make_geometry(dtype: torch.dtype = torch.float32, block_size: int = 4) -> KVGeometry:
    return KVGeometry(block_size=block_size, num_kv_heads=2, head_dim=3, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_pool_is_zeroed_and_has_a_block_more_than_it_gives_away(dtype: torch.dtype) -> None:
    storage = KVStorage(num_layers=3, num_blocks=5, geometry=make_geometry(dtype))
    assert len(storage.layers) == 3
    assert (storage.null_block, storage.null_slot) == (5, 20)
    for layer in storage.layers:
        for tensor in (layer.key, layer.value):
            assert tensor.dtype == dtype
            assert tensor.shape == (6, 4, 2, 3)
            assert not tensor.any()


def test_layers_share_no_memory() -> None:
    storage = KVStorage(num_layers=2, num_blocks=2, geometry=make_geometry())
    tensors = [tensor for layer in storage.layers for tensor in (layer.key, layer.value)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [float(tensor.mean()) for tensor in tensors] == [0.0, 1.0, 2.0, 3.0]


@given(slots=st.lists(st.integers(0, 23), min_size=1, max_size=10, unique=True), is_view=st.booleans())
@settings(deadline=None)
def test_rows_land_in_their_slots_and_nowhere_else(slots: list[int], is_view: bool) -> None:
    storage = KVStorage(num_layers=1, num_blocks=5, geometry=make_geometry())
    rows = torch.arange(1.0, len(slots) * 12 + 1).view(len(slots), 4, 3)
    key, value = rows[:, :2], rows[:, 2:]
    if not is_view:
        key, value = key.contiguous(), value.contiguous()
    storage.layers[0].write(key, value, torch.tensor(slots))
    for tensor, written in ((storage.layers[0].key, key), (storage.layers[0].value, value)):
        for row, slot in enumerate(slots):
            assert torch.equal(tensor[slot // 4, slot % 4], written[row])
        assert int(tensor.count_nonzero()) == written.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_only(dtype: torch.dtype) -> None:
    """1e6 is a number, but beyond fp16, which stores its largest one instead."""
    storage = KVStorage(num_layers=1, num_blocks=1, geometry=make_geometry(dtype))
    key = torch.full((3, 2, 3), 2.0)
    key[0, 0] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    key[1, 1, 2] = 1e6
    storage.layers[0].write(key, -key, torch.tensor([0, 2, storage.null_slot]))
    cached = storage.layers[0].key
    assert cached[0, 0].tolist() == [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]]
    assert float(cached[0, 2, 1, 2]) == (1e6 if dtype == torch.float32 else 65504.0)
    assert cached.isfinite().all()
    assert storage.layers[0].value.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_block_bytes_are_what_a_block_takes(dtype: torch.dtype) -> None:
    geometry = make_geometry(dtype, block_size=8)
    storage = KVStorage(num_layers=3, num_blocks=7, geometry=geometry)
    taken = sum(tensor[0].nbytes for layer in storage.layers for tensor in (layer.key, layer.value))
    assert geometry.block_bytes(3) == taken


def test_eight_bits_are_rounded_once_and_kept() -> None:
    storage = KVStorage(num_layers=1, num_blocks=2, geometry=make_geometry(torch.float8_e4m3fn))
    rows = torch.tensor([0.1, -3.3, 1e6]).expand(2, 2, 3)
    storage.layers[0].write(rows, rows, torch.tensor([1, 5]))
    storage.layers[0].move(torch.tensor([1]), torch.tensor([2]))
    expected = torch.tensor([0.1015625, -3.25, 448.0]).expand(2, 3)
    for slot in (1, 2, 5):
        assert torch.equal(storage.layers[0].key[slot // 4, slot % 4].float(), expected)


@given(places=st.lists(st.tuples(st.integers(0, 23), st.integers(0, 23)), max_size=8, unique_by=lambda pair: pair[1]))
@settings(deadline=None)
def test_slots_are_moved_all_at_once(places: list[tuple[int, int]]) -> None:
    """A slot that is overwritten is still read as it was."""
    storage = KVStorage(num_layers=2, num_blocks=5, geometry=make_geometry())
    for layer in storage.layers:
        layer.key.copy_(torch.rand(layer.key.shape))
        layer.value.copy_(torch.rand(layer.value.shape))
    before = [(layer.key.flatten(0, 1).clone(), layer.value.flatten(0, 1).clone()) for layer in storage.layers]
    sources, destinations = ([pair[side] for pair in places] for side in (0, 1))
    storage.move(torch.tensor(sources, dtype=torch.int64), torch.tensor(destinations, dtype=torch.int64))
    origin = dict(zip(destinations, sources, strict=True))
    for layer, (keys, values) in zip(storage.layers, before, strict=True):
        for slot in range(24):
            assert torch.equal(layer.key.flatten(0, 1)[slot], keys[origin.get(slot, slot)])
            assert torch.equal(layer.value.flatten(0, 1)[slot], values[origin.get(slot, slot)])
