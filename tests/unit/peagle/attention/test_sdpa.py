"""The portable backend against the obvious one, over drawn layouts; and what must not influence a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.attention.backend import AttentionBackend
from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.attention.reference import ReferenceAttention
from peagle.attention.sdpa import SdpaAttention
from peagle.kv_cache.storage import KVGeometry, KVStorage, LayerCache

HEAD_DIM = 8
NUM_BLOCKS = 48
TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """A grid to be built: sequences as (start, number of real rows); more rows and sequences are padding."""

    seqs: tuple[tuple[int, int], ...]
    width: int
    num_padding_seqs: int = 0
    num_padding_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A step to be built, with the shape of its heads."""

    groups: tuple[GroupPlan, ...]
    num_kv_heads: int = 2
    gqa_ratio: int = 2
    block_size: int = 4
    sliding_window: int | None = None
    has_sinks: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Tensors of a step, and which of its rows are real."""

    query: Tensor
    key: Tensor
    value: Tensor
    metadata: AttentionMetadata
    is_real: Tensor  # [num_rows] bool
    sinks: Tensor | None


@st.composite
def group_plans(draw: st.DrawFn) -> GroupPlan:
    width = draw(st.integers(1, 5))
    seq = st.tuples(st.integers(0, 20), st.integers(1, width))
    return GroupPlan(
        seqs=tuple(draw(st.lists(seq, min_size=1, max_size=3))),
        width=width,
        num_padding_seqs=draw(st.integers(0, 2)),
        num_padding_blocks=draw(st.integers(0, 2)),
    )


layouts = st.builds(
    Layout,
    groups=st.lists(group_plans(), min_size=1, max_size=3).map(tuple),
    num_kv_heads=st.integers(1, 3),
    gqa_ratio=st.integers(1, 4),
    block_size=st.sampled_from([2, 4, 5]),
    sliding_window=st.none() | st.integers(1, 10),
    has_sinks=st.booleans(),
    seed=st.integers(0, 5),
)


def make_cache(layout: Layout, dtype: torch.dtype = torch.float64) -> KVStorage:
    """One layer full of random keys and values, as if every block had been used before."""
    geometry = KVGeometry(
        block_size=layout.block_size,
        num_kv_heads=layout.num_kv_heads,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    storage = KVStorage(num_layers=1, num_blocks=NUM_BLOCKS * 4, geometry=geometry)
    generator = torch.Generator().manual_seed(99)
    for tensor in (storage.layers[0].key, storage.layers[0].value):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return storage


def build_step(layout: Layout, storage: KVStorage) -> Step:
    """Draw blocks without order, and random rows; real rows get the same numbers whatever the padding."""
    generator = torch.Generator().manual_seed(layout.seed)
    blocks = torch.randperm(storage.num_blocks, generator=generator).tolist()
    groups: list[QueryGroup] = []
    slots: list[int] = []
    real: list[bool] = []
    row_seeds: list[int] = []
    for number, plan in enumerate(layout.groups):
        num_seqs = len(plan.seqs) + plan.num_padding_seqs
        counts = [-(-(start + rows) // layout.block_size) for start, rows in plan.seqs]
        tables = torch.full((num_seqs, max(counts) + plan.num_padding_blocks), storage.null_block)
        positions = torch.zeros(num_seqs, plan.width, dtype=torch.int64)
        first_row = len(slots)
        for seq in range(num_seqs):
            start, num_rows = plan.seqs[seq] if seq < len(plan.seqs) else (0, 0)
            if num_rows:
                tables[seq, : counts[seq]] = torch.tensor([blocks.pop() for _ in range(counts[seq])])
            for row in range(plan.width):
                real.append(row < num_rows)
                row_seeds.append(10_000 * number + 100 * seq + row)
                position = start + row
                if real[-1]:
                    positions[seq, row] = position
                    block = int(tables[seq, position // layout.block_size])
                    slots.append(block * layout.block_size + position % layout.block_size)
                else:
                    slots.append(storage.null_slot)
        groups.append(
            QueryGroup(
                first_row=first_row,
                positions=positions,
                block_tables=tables,
                block_size=layout.block_size,
                dtype=torch.float64,
            )
        )
    num_heads = layout.num_kv_heads * layout.gqa_ratio
    total = num_heads + 2 * layout.num_kv_heads
    rows = torch.stack([_random_row(layout.seed, row_seed, total) for row_seed in row_seeds])
    return Step(
        query=rows[:, :num_heads],
        key=rows[:, num_heads : num_heads + layout.num_kv_heads],
        value=rows[:, num_heads + layout.num_kv_heads :],
        metadata=AttentionMetadata(slot_mapping=torch.tensor(slots), groups=tuple(groups)),
        is_real=torch.tensor(real),
        sinks=torch.randn(num_heads, generator=generator, dtype=torch.float64) if layout.has_sinks else None,
    )


def _random_row(seed: int, row_seed: int, num_heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + row_seed)
    return torch.randn(num_heads, HEAD_DIM, generator=generator, dtype=torch.float64)


def attend(backend: AttentionBackend, step: Step, cache: LayerCache, layout: Layout) -> Tensor:
    """Outputs of the real rows."""
    output = backend(
        step.query,
        step.key,
        step.value,
        cache,
        step.metadata,
        scaling=0.3,
        sliding_window=layout.sliding_window,
        sinks=step.sinks,
    )
    assert output.shape == step.query.shape
    return output[step.is_real]


def run(layout: Layout, backend: AttentionBackend | None = None) -> Tensor:
    """Outputs of the real rows of a step on a cache of its own."""
    storage = make_cache(layout)
    return attend(backend or SdpaAttention(), build_step(layout, storage), storage.layers[0], layout)


@given(steps=st.lists(layouts, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_equals_the_reference(steps: Sequence[Layout]) -> None:
    """One backend serves all steps, so that its scratch grows, shrinks and changes shape."""
    backend = SdpaAttention()
    for layout in steps:
        fast, slow = make_cache(layout), make_cache(layout)
        got = attend(backend, build_step(layout, fast), fast.layers[0], layout)
        wanted = attend(ReferenceAttention(), build_step(layout, slow), slow.layers[0], layout)
        assert (got - wanted).abs().max() < TOLERANCE
        owned = slice(0, fast.num_blocks)
        assert torch.equal(fast.layers[0].key[owned], slow.layers[0].key[owned])
        assert torch.equal(fast.layers[0].value[owned], slow.layers[0].value[owned])


def test_outputs_outlive_the_scratch() -> None:
    layout = Layout(groups=(GroupPlan(seqs=((6, 2), (3, 1)), width=2),))
    backend = SdpaAttention()
    first = run(layout, backend)
    kept = first.clone()
    run(replace(layout, seed=4), backend)
    assert torch.equal(first, kept)


@given(layout=layouts)
@settings(max_examples=25, deadline=None)
def test_padding_changes_nothing(layout: Layout) -> None:
    bare = [replace(plan, num_padding_seqs=0, num_padding_blocks=0) for plan in layout.groups]
    assert (run(layout) - run(replace(layout, groups=tuple(bare)))).abs().max() < TOLERANCE


@pytest.mark.parametrize("has_sinks", [False, True])
def test_no_row_depends_on_another_group(has_sinks: bool) -> None:
    """The other group holds NaN: queries, and keys and values in its own blocks and the null block."""
    plan = GroupPlan(seqs=((9, 2), (2, 3)), width=3, num_padding_blocks=1, num_padding_seqs=1)
    layout = Layout(groups=(plan, GroupPlan(seqs=((5, 2),), width=3)), has_sinks=has_sinks)
    storage = make_cache(layout)
    wanted = attend(SdpaAttention(), build_step(layout, storage), storage.layers[0], layout)
    broken = make_cache(layout)
    step = build_step(layout, broken)
    own = slice(0, step.metadata.groups[1].first_row)
    for rows in (step.query, step.key, step.value):
        rows[step.metadata.groups[1].first_row :] = float("nan")
    got = attend(SdpaAttention(), step, broken.layers[0], layout)
    num_own = int(step.is_real[own].sum())
    assert torch.equal(got[:num_own], wanted[:num_own])
    assert got[num_own:].isnan().all(), "a broken row stays broken"


def test_what_a_row_must_not_see_can_be_anything_finite() -> None:
    layout = Layout(groups=(GroupPlan(seqs=((6, 2), (1, 1)), width=2),))
    wanted = run(layout)
    storage = make_cache(layout)
    step = build_step(layout, storage)
    for cache in (storage.layers[0].key, storage.layers[0].value):
        for seq, (start, num_rows) in enumerate(layout.groups[0].seqs):
            table = step.metadata.groups[0].block_tables[seq]
            context = cache[table].flatten(0, 1)
            context[start + num_rows :] = 1e6
            cache[table] = context.view(-1, *cache.shape[1:])
    assert torch.equal(attend(SdpaAttention(), step, storage.layers[0], layout), wanted)


@pytest.mark.parametrize("backend", [SdpaAttention(), ReferenceAttention()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_cache_is_read_as_float32(backend: AttentionBackend, dtype: torch.dtype) -> None:
    layout = Layout(groups=(GroupPlan(seqs=((7, 2), (0, 1)), width=2), GroupPlan(seqs=((0, 5),), width=5)))
    half = make_cache(layout, dtype)
    exact = make_cache(layout, torch.float32)
    step = build_step(layout, half)
    groups = tuple(replace(group, dtype=torch.float32, _masks={}) for group in step.metadata.groups)
    step = replace(
        step,
        query=step.query.float(),
        key=step.key.to(dtype).float(),
        value=step.value.to(dtype).float(),
        metadata=replace(step.metadata, groups=groups),
    )
    for source, target in zip(
        (half.layers[0].key, half.layers[0].value), (exact.layers[0].key, exact.layers[0].value), strict=True
    ):
        target.copy_(source)
    got = attend(backend, step, half.layers[0], layout)
    assert got.dtype == torch.float32
    assert torch.equal(got, attend(backend, step, exact.layers[0], layout))
