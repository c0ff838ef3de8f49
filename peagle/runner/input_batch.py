"""From scheduled sequences to packed rows.

A step's rows are sections: first the decoding sequences (one row per known token or draft) as a grid padded to one
width, or as a few where shapes are not captured; then each chunk of a prefill as a grid of its own. If any drafts of a
grid are a tree, the whole grid is one of trees, of which chains are a kind (`tree_rows`). Owns the order of rows
and the padding. Refuses to know models; arrays are numpy, so that they are built once on the host and copied once.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peagle.attention.width_classes import width_classes
from peagle.cuda_graphs.buckets import Buckets, GridShape, Span, split_spans
from peagle.outputs import ScheduledSequence
from peagle.runner.tree_rows import is_tree, parent_rows, row_positions

IntArray = NDArray[np.int64]

# A span costs one more gather and attention call in each layer: about 40 us on CPU, the time of ~64 gathered blocks.
_MIN_SAVED_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePool:
    """Where rows may point: geometry of a KV pool, and the place for padding."""

    block_size: int
    null_block: int

    @property
    def null_slot(self) -> int:
        """Flat slot that swallows writes."""
        return self.null_block * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingPolicy:
    """How decoding grids are padded. Built from the graph configuration, once."""

    batch_sizes: Buckets
    block_counts: Buckets
    draft_block_counts: Buckets  # a draft grid looks K - 1 slots further than the target's
    fixed_width: int | None  # K + 1 where shapes are captured; None: as wide as this step needs
    may_split: bool  # several grids and spans, where shapes are not captured


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A grid of rows: sequences (indices into the step's scheduled sequences) with equally many rows each."""

    shape: GridShape
    indices: tuple[int, ...]  # real sequences; the grid may hold more, padded ones
    first_row: int
    input_ids: IntArray  # [num_seqs * width]
    positions: IntArray  # [num_seqs * width]
    slot_mapping: IntArray  # [num_seqs * width]
    block_tables: IntArray  # [num_seqs, largest num_blocks]
    parent_rows: IntArray | None  # [num_seqs * width], see `attention.tree_mask`; None where all drafts are chains


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """All sections of a step."""

    scheduled: tuple[ScheduledSequence, ...]
    sections: tuple[Section, ...]
    first_rows: tuple[int, ...]  # first row of each scheduled sequence
    is_decode_only: bool  # exactly one section, a decoding grid: it can run as a graph

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """The sequences that sample, in the order of their rows."""
        return [sequence for _, sequence in self._sampling_by_row()]

    @property
    def logit_rows(self) -> list[int]:
        """Rows whose logits are sampled, ascending: each sampling sequence's last known token, and its drafts."""
        rows: list[int] = []
        for first, sequence in self._sampling_by_row():
            rows.extend(range(first + sequence.num_known_tokens - 1, first + len(sequence.token_ids)))
        return rows

    def _sampling_by_row(self) -> list[tuple[int, ScheduledSequence]]:
        pairs = zip(self.first_rows, self.scheduled, strict=True)
        return sorted((pair for pair in pairs if pair[1].is_sampling), key=lambda pair: pair[0])


def build_input_batch(
    scheduled: tuple[ScheduledSequence, ...], pool: PagePool, padding: PaddingPolicy, *, max_width: int
) -> InputBatch:
    """Pack a step.

    Args:
        scheduled: the step's sequences.
        pool: the target's KV pool.
        padding: how grids are padded.
        max_width: rows up to which a sampling sequence counts as decoding: K + 1.
    """
    decoding = [i for i, s in enumerate(scheduled) if s.is_sampling and len(s.token_ids) <= max_width]
    chunks = sorted(set(range(len(scheduled))) - set(decoding))
    first_rows = [0] * len(scheduled)
    sections: list[Section] = []
    first_row = 0
    for members in _decode_grids(scheduled, decoding, padding):
        section = _decode_section(scheduled, members, first_row, pool, padding)
        sections.append(section)
        for slot, index in enumerate(section.indices):
            first_rows[index] = first_row + slot * section.shape.width
        first_row += section.shape.num_rows
    for index in chunks:
        section = _chunk_section(scheduled[index], index, first_row, pool)
        sections.append(section)
        first_rows[index] = first_row
        first_row += section.shape.num_rows
    return InputBatch(
        scheduled=scheduled,
        sections=tuple(sections),
        first_rows=tuple(first_rows),
        is_decode_only=len(sections) == 1 and not chunks,
    )


def _num_blocks(sequence: ScheduledSequence, block_size: int) -> int:
    """Blocks that the sequence's last row looks at."""
    return -(-(sequence.start + len(sequence.token_ids)) // block_size)


def _decode_grids(
    scheduled: tuple[ScheduledSequence, ...], decoding: list[int], padding: PaddingPolicy
) -> list[list[int]]:
    """Sequences that share a grid."""
    if not padding.may_split:
        return [decoding] if decoding else []
    grids = width_classes([len(scheduled[i].token_ids) for i in decoding])
    return [[decoding[place] for place in grid] for grid in grids]


def _decode_section(
    scheduled: tuple[ScheduledSequence, ...],
    members: list[int],
    first_row: int,
    pool: PagePool,
    padding: PaddingPolicy,
) -> Section:
    order = sorted(members, key=lambda i: -_num_blocks(scheduled[i], pool.block_size))
    counts = [_num_blocks(scheduled[i], pool.block_size) for i in order]
    width = padding.fixed_width or max(len(scheduled[i].token_ids) for i in order)
    if padding.may_split:
        spans = split_spans(counts, min_saved_blocks=_MIN_SAVED_BLOCKS)
    else:
        spans = (Span(padding.batch_sizes.round_up(len(order)), padding.block_counts.round_up(counts[0])),)
    shape = GridShape(width, spans)
    return _fill_section([scheduled[i] for i in order], tuple(order), shape, first_row, pool)


def _chunk_section(sequence: ScheduledSequence, index: int, first_row: int, pool: PagePool) -> Section:
    span = Span(1, _num_blocks(sequence, pool.block_size))
    return _fill_section([sequence], (index,), GridShape(len(sequence.token_ids), (span,)), first_row, pool)


def _fill_section(
    sequences: SequenceOf[ScheduledSequence],
    indices: tuple[int, ...],
    shape: GridShape,
    first_row: int,
    pool: PagePool,
) -> Section:
    grid = (shape.num_seqs, shape.width)
    input_ids = np.zeros(grid, dtype=np.int64)
    positions = np.zeros(grid, dtype=np.int64)
    slots = np.full(grid, pool.null_slot, dtype=np.int64)
    tables = np.full((shape.num_seqs, shape.spans[0].num_blocks), pool.null_block, dtype=np.int64)
    parents = _row_parents(sequences, grid) if any(is_tree(sequence) for sequence in sequences) else None
    for row, sequence in enumerate(sequences):
        num_rows = len(sequence.token_ids)
        num_blocks = _num_blocks(sequence, pool.block_size)
        span = np.arange(sequence.start, sequence.start + num_rows)
        input_ids[row, :num_rows] = sequence.token_ids
        positions[row, :num_rows] = span if parents is None else row_positions(sequence)
        tables[row, :num_blocks] = sequence.block_table[:num_blocks]
        slots[row, :num_rows] = tables[row, span // pool.block_size] * pool.block_size + span % pool.block_size
    return Section(
        shape=shape,
        indices=indices,
        first_row=first_row,
        input_ids=input_ids.reshape(-1),
        positions=positions.reshape(-1),
        slot_mapping=slots.reshape(-1),
        block_tables=tables,
        parent_rows=None if parents is None else parents.reshape(-1),
    )


def _row_parents(sequences: SequenceOf[ScheduledSequence], grid: tuple[int, int]) -> IntArray:
    """Parent rows of a grid, [num_seqs, width]; padding names row 0."""
    parents = np.zeros(grid, dtype=np.int64)
    parents[:, 0] = -1
    for row, sequence in enumerate(sequences):
        parents[row, : len(sequence.token_ids)] = parent_rows(sequence)
    return parents
