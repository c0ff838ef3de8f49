"""One draft pass, laid out on the host.

A verified step made some rows of each sequence valid: the known ones and the accepted drafts. Each valid row at
position p becomes slot p: the token *after* p, the target's feature of the row. They are fed again even if a mask slot
of the last pass stood there, because that one left a placeholder's key and value. A sequence that drafts gets mask
slots behind its newest slot. Rows in a grid look like this, with K = 4 and two accepted drafts (width 2K = 8):

    slot     p    p+1  p+2   p+3   p+4   p+5   pad  pad
    token    d1   d2   y     mask  mask  mask  .    .
    feature  f_p  f_p1 f_p2  mask  mask  mask  .    .
    drafts             1st   2nd   3rd   4th

Padding comes last, writes to the null slot and sees one key; block tables are padded with the null block, so that
nothing of another sequence is gathered, not even under a mask. Owns the layout, in plain integers. Refuses to know
how the rows are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peagle.attention.width_classes import width_classes
from peagle.drafter.interface import DraftBatch
from peagle.outputs import ScheduledSequence

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRules:
    """Constants of the drafter that lay out its slots."""

    num_speculative_tokens: int  # K, the depths that are drafted; a tree has more drafts than depths
    mask_token_id: int
    block_size: int
    null_slot: int
    max_model_len: int  # slots from here on are never written and never drafted from


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """A fixed shape to pad to: one grid of `num_seqs` sequences of `width` rows."""

    num_seqs: int
    width: int  # 2K holds every decoding sequence
    num_blocks: int  # columns of the block table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotGrid:
    """Sequences with the same number of rows."""

    first_row: int
    positions: IntArray  # [num_seqs, width]
    block_tables: IntArray  # [num_seqs, num_blocks]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftInputs:
    """All rows of a draft pass (T rows)."""

    token_ids: IntArray  # [T]
    feature_rows: IntArray  # [T], rows of the target's features; the row after the last one stands for the mask
    slot_mapping: IntArray  # [T]
    grids: tuple[SlotGrid, ...]
    # Row of each draft, [D, K], or as many columns as the most drafts that are asked for where no shape is fixed; the
    # newest slot's row where none was asked for.
    logits_rows: IntArray
    drafting: tuple[int, ...]  # entries of `scheduled` that draft, ascending, in the order of `logits_rows`
    num_drafts: tuple[int, ...]  # depths to draft, for each of them: for a chain its drafts

    @property
    def unasked(self) -> npt.NDArray[np.bool_]:
        """Which drafts nobody asked for, as wide as `logits_rows`."""
        depths = np.arange(self.logits_rows.shape[1])
        return depths >= np.array(self.num_drafts, dtype=np.int64)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SequenceSlots:
    """Rows of one sequence, before padding."""

    index: int  # in `scheduled`
    start: int
    token_ids: list[int]  # valid slots, then mask slots
    feature_rows: IntArray  # of the valid slots
    num_drafts: int
    block_table: Sequence[int]

    @property
    def num_valid(self) -> int:
        return len(self.feature_rows)

    @property
    def width(self) -> int:
        return len(self.token_ids)


def build_inputs(batch: DraftBatch, rules: SlotRules, shape: DraftShape | None = None) -> DraftInputs:
    """Lay out a draft pass.

    Args:
        batch: a verified step.
        rules: constants of the drafter.
        shape: one grid of this shape, which must hold every sequence. None: sequences of similar width share a grid.
    """
    slots = [
        _sequence_slots(batch, index, rules)
        for index, scheduled in enumerate(batch.scheduled)
        if batch.output_token_ids[index] or not scheduled.is_sampling
    ]
    writer = _RowWriter(rules, mask_feature_row=batch.features.shape[0])
    if shape is not None:
        writer.add_grid(slots, shape)
    else:
        for grid in width_classes([one.width for one in slots]):
            members = [slots[place] for place in grid]
            width = max(one.width for one in members)
            num_blocks = max(_num_blocks(one, rules) for one in members)
            writer.add_grid(members, DraftShape(num_seqs=len(members), width=width, num_blocks=num_blocks))
    return writer.finish(num_drafting=None if shape is None else shape.num_seqs)


def _sequence_slots(batch: DraftBatch, index: int, rules: SlotRules) -> _SequenceSlots:
    scheduled = batch.scheduled[index]
    emitted = batch.output_token_ids[index]
    next_token_ids, num_drafts = _next_tokens(scheduled, emitted), 0
    num_valid = len(next_token_ids)
    if scheduled.is_sampling:
        room = rules.max_model_len - (scheduled.start + num_valid - 1)  # positions for the newest slot and mask slots
        num_drafts = max(0, min(scheduled.max_next_drafts, rules.num_speculative_tokens, room))
    masks = [rules.mask_token_id] * max(0, num_drafts - 1)
    return _SequenceSlots(
        index=index,
        start=scheduled.start,
        token_ids=next_token_ids + masks,
        feature_rows=_feature_rows(batch, index, num_valid),
        num_drafts=num_drafts,
        block_table=scheduled.drafter_block_table,
    )


def _next_tokens(scheduled: ScheduledSequence, emitted: Sequence[int]) -> list[int]:
    """The token after each valid row."""
    known = list(scheduled.token_ids[1 : scheduled.num_known_tokens])
    if scheduled.is_sampling:
        return known + list(emitted)
    assert scheduled.next_token_id is not None
    return [*known, scheduled.next_token_id]


def _feature_rows(batch: DraftBatch, index: int, num_valid: int) -> IntArray:
    """Rows of the target that hold the features of the valid slots."""
    scheduled, first = batch.scheduled[index], batch.first_rows[index]
    accepted = batch.accepted_rows.get(scheduled.seq_id)
    if accepted is None:
        return np.arange(first, first + num_valid)
    rows = np.array([*range(first, first + scheduled.num_known_tokens), *accepted], dtype=np.int64)
    assert len(rows) == num_valid
    return rows


def _num_blocks(slots: _SequenceSlots, rules: SlotRules) -> int:
    return -(-(slots.start + slots.width) // rules.block_size)


class _RowWriter:
    """Appends grids of rows."""

    def __init__(self, rules: SlotRules, *, mask_feature_row: int) -> None:
        self._rules = rules
        self._mask_feature_row = mask_feature_row
        self._num_rows = 0
        self._token_ids: list[IntArray] = []
        self._feature_rows: list[IntArray] = []
        self._slot_mapping: list[IntArray] = []
        self._grids: list[SlotGrid] = []
        self._logits_rows: list[list[int]] = []
        self._drafting: list[int] = []
        self._num_drafts: list[int] = []

    def add_grid(self, members: Sequence[_SequenceSlots], shape: DraftShape) -> None:
        assert len(members) <= shape.num_seqs
        size = (shape.num_seqs, shape.width)
        token_ids = np.full(size, self._rules.mask_token_id, dtype=np.int64)
        feature_rows = np.full(size, self._mask_feature_row, dtype=np.int64)
        positions = np.zeros(size, dtype=np.int64)
        slot_mapping = np.full(size, self._rules.null_slot, dtype=np.int64)
        null_block = self._rules.null_slot // self._rules.block_size
        block_tables = np.full((shape.num_seqs, shape.num_blocks), null_block, dtype=np.int64)
        for i, slots in enumerate(members):
            assert slots.width <= shape.width
            num_blocks = _num_blocks(slots, self._rules)
            assert num_blocks <= min(shape.num_blocks, len(slots.block_table)), "a slot has no block"
            block_table = np.asarray(slots.block_table[:num_blocks], dtype=np.int64)
            span = np.arange(slots.start, slots.start + slots.width)
            block_tables[i, :num_blocks] = block_table
            token_ids[i, : slots.width] = slots.token_ids
            feature_rows[i, : slots.num_valid] = slots.feature_rows
            positions[i, : slots.width] = span
            blocks = block_table[span // self._rules.block_size]
            slot_mapping[i, : slots.width] = blocks * self._rules.block_size + span % self._rules.block_size
            self._add_drafts(slots, self._num_rows + i * shape.width)
        self._token_ids.append(token_ids)
        self._feature_rows.append(feature_rows)
        self._slot_mapping.append(slot_mapping)
        self._grids.append(SlotGrid(first_row=self._num_rows, positions=positions, block_tables=block_tables))
        self._num_rows += token_ids.size

    def _add_drafts(self, slots: _SequenceSlots, first_row: int) -> None:
        if slots.num_drafts == 0:
            return
        newest = first_row + slots.num_valid - 1
        depths = range(self._rules.num_speculative_tokens)
        drafts = [newest + depth if depth < slots.num_drafts else newest for depth in depths]
        self._logits_rows.append(drafts)
        self._drafting.append(slots.index)
        self._num_drafts.append(slots.num_drafts)

    def finish(self, *, num_drafting: int | None) -> DraftInputs:
        order = sorted(range(len(self._drafting)), key=self._drafting.__getitem__)  # grids do not follow `scheduled`
        rows = np.array([self._logits_rows[i] for i in order], dtype=np.int64)
        rows = rows.reshape(-1, self._rules.num_speculative_tokens)
        if num_drafting is None:  # a product with the draft vocabulary for a draft that nobody asked for is waste
            rows = rows[:, : max(self._num_drafts, default=self._rules.num_speculative_tokens)]
        else:
            rows = np.pad(rows, ((0, num_drafting - len(rows)), (0, 0)))
        return DraftInputs(
            token_ids=_concatenate(self._token_ids),
            feature_rows=_concatenate(self._feature_rows),
            slot_mapping=_concatenate(self._slot_mapping),
            grids=tuple(self._grids),
            logits_rows=rows,
            drafting=tuple(self._drafting[i] for i in order),
            num_drafts=tuple(self._num_drafts[i] for i in order),
        )


def _concatenate(parts: list[IntArray]) -> IntArray:
    return np.concatenate([part.ravel() for part in parts]) if parts else np.empty(0, dtype=np.int64)
