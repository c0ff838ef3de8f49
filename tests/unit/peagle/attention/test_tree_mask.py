"""Masks of trees against walks from row to parent, and attention with them against the obvious backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.attention.metadata import QueryGroup
from peagle.attention.reference import ReferenceAttention
from peagle.attention.sdpa import SdpaAttention
from peagle.attention.tree_mask import lineage, node_parent_rows, tree_positions, visible_keys
from tests.unit.peagle.attention.test_sdpa import TOLERANCE, GroupPlan, Layout, Step, attend, build_step, make_cache


@st.composite
def parent_rows(draw: st.DrawFn, width: int) -> list[int]:
    """Any tree of rows: row 0 is the first, and parents come before children."""
    return [-1, *(draw(st.integers(0, row - 1)) for row in range(1, width))]


def walk(parents: list[int], row: int) -> list[int]:
    """A row's ancestors and itself, from row 0 on."""
    return [] if row < 0 else [*walk(parents, parents[row]), row]


@given(st.integers(1, 20).flatmap(lambda width: st.lists(parent_rows(width), min_size=1, max_size=3)))
@settings(deadline=None)
def test_lineage_and_positions_follow_the_parents(batch: list[list[int]]) -> None:
    family = lineage(torch.tensor(batch))
    positions = tree_positions(torch.arange(len(batch)) * 10, torch.tensor(batch))
    for n, parents in enumerate(batch):
        for row in range(len(parents)):
            assert family[n, row].nonzero().flatten().tolist() == walk(parents, row)
            assert positions[n, row] == 10 * n + len(walk(parents, row)) - 1


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33])
def test_lineage_reaches_the_end_of_a_chain(width: int) -> None:
    chain = torch.arange(-1, width - 1)[None]
    assert torch.equal(lineage(chain)[0], torch.ones(width, width).tril().bool())


def test_nodes_below_a_root() -> None:
    """Node 2 hangs below node 0; the second tree has one node and padding."""
    assert node_parent_rows(torch.tensor([[-1, -1, 0], [-1, -1, -1]])).tolist() == [[-1, 0, 0, 1], [-1, 0, 0, 0]]


@given(
    parents=st.integers(1, 8).flatmap(parent_rows),
    start=st.integers(0, 9),
    sliding_window=st.none() | st.integers(1, 12),
)
@settings(deadline=None)
def test_a_row_sees_the_text_that_ends_in_it(parents: list[int], start: int, sliding_window: int | None) -> None:
    rows = torch.tensor([parents])
    positions = tree_positions(torch.tensor([start]), rows)
    num_keys = start + len(parents) + 2
    visible = visible_keys(positions, rows, num_keys=num_keys, sliding_window=sliding_window)
    assert visible.shape == (1, len(parents), num_keys)
    for row in range(len(parents)):
        text = [*range(start), *(start + ancestor for ancestor in walk(parents, row))]
        assert visible[0, row].nonzero().flatten().tolist() == text[-sliding_window if sliding_window else 0 :]


@given(width=st.integers(1, 6), starts=st.lists(st.integers(0, 9), min_size=1, max_size=3), window=st.integers(1, 9))
@settings(deadline=None)
def test_a_chain_as_a_tree_has_the_mask_of_a_chain(width: int, starts: list[int], window: int) -> None:
    group = QueryGroup(
        first_row=0,
        positions=torch.tensor(starts)[:, None] + torch.arange(width),
        block_tables=torch.zeros(len(starts), 4, dtype=torch.int64),
        block_size=4,
        dtype=torch.float64,
    )
    chain = torch.arange(-1, width - 1).expand(len(starts), -1)
    for sliding_window in (None, window):
        as_tree = replace(group, parent_rows=chain, _masks={}, _row_masks={})
        assert torch.equal(as_tree.mask(sliding_window), group.mask(sliding_window))


@st.composite
def tree_layouts(draw: st.DrawFn) -> Layout:
    width = draw(st.integers(1, 9))
    seq = st.tuples(st.integers(0, 20), st.integers(1, width))
    plan = GroupPlan(
        seqs=tuple(draw(st.lists(seq, min_size=1, max_size=3))),
        width=width,
        num_padding_seqs=draw(st.integers(0, 2)),
        num_padding_blocks=draw(st.integers(0, 2)),
    )
    chunk = GroupPlan(seqs=((draw(st.integers(0, 5)), 4),), width=4)
    return Layout(
        groups=(plan, chunk) if draw(st.booleans()) else (plan,),
        num_kv_heads=draw(st.integers(1, 2)),
        gqa_ratio=draw(st.integers(1, 3)),
        block_size=draw(st.sampled_from([2, 4, 5])),
        sliding_window=draw(st.none() | st.integers(1, 10)),
        has_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
    )


def as_trees(step: Step, layout: Layout, trees: list[list[int]]) -> Step:
    """The step with the rows of its first group turned into trees; padding rows name row 0."""
    group, *others = step.metadata.groups
    parents = torch.zeros_like(group.positions)
    parents[:, 0] = -1
    positions = torch.zeros_like(group.positions)
    for seq, ((start, num_rows), tree) in enumerate(zip(layout.groups[0].seqs, trees, strict=True)):
        parents[seq, :num_rows] = torch.tensor(tree[:num_rows])
        positions[seq, :num_rows] = tree_positions(torch.tensor([start]), torch.tensor([tree[:num_rows]]))[0]
    group = replace(group, positions=positions, parent_rows=parents, _masks={}, _row_masks={})
    return replace(step, metadata=replace(step.metadata, groups=(group, *others)))


@given(layout=tree_layouts(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_trees_equal_the_reference(layout: Layout, data: st.DataObject) -> None:
    trees = [data.draw(parent_rows(layout.groups[0].width)) for _ in layout.groups[0].seqs]
    fast, slow = make_cache(layout), make_cache(layout)
    step = as_trees(build_step(layout, fast), layout, trees)
    got = attend(SdpaAttention(), step, fast.layers[0], layout)
    wanted = attend(ReferenceAttention(), as_trees(build_step(layout, slow), layout, trees), slow.layers[0], layout)
    assert (got - wanted).abs().max() < TOLERANCE
    assert all_rows(step, fast.layers[0], layout).isfinite().all(), "padding too has something to see"


def all_rows(step: Step, cache: object, layout: Layout) -> Tensor:
    """Outputs of real and padding rows."""
    return attend(SdpaAttention(), replace(step, is_real=torch.ones_like(step.is_real)), cache, layout)  # type: ignore[arg-type]


@given(data=st.data(), sliding_window=st.none() | st.integers(1, 10))
@settings(max_examples=40, deadline=None)
def test_rows_off_the_path_have_no_influence(data: st.DataObject, sliding_window: int | None) -> None:
    """Whatever a row's siblings hold: its output has the same bits."""
    width = data.draw(st.integers(2, 9))
    tree = data.draw(parent_rows(width))
    row = data.draw(st.integers(0, width - 1))
    layout = Layout(groups=(GroupPlan(seqs=((6, width),), width=width),), sliding_window=sliding_window)
    outputs = []
    for filling in (None, 1e3):
        storage = make_cache(layout)
        step = as_trees(build_step(layout, storage), layout, [tree])
        if filling is not None:
            others = [other for other in range(width) if other not in walk(tree, row)]
            for rows in (step.query, step.key, step.value):
                rows[others] = filling
        outputs.append(attend(SdpaAttention(), step, storage.layers[0], layout)[row])
    assert torch.equal(outputs[0], outputs[1])
