"""Packing against a naive construction, row by row, for both ways of padding."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.outputs import ScheduledSequence
from peagle.runner.input_batch import InputBatch, PagePool, Section, build_input_batch
from peagle.sampling_params import SamplingParams
from tests.builders.runner import PADDINGS, RunnerSizes

SIZES = RunnerSizes(num_speculative_tokens=3, max_num_seqs=6, max_model_len=400, block_size=4)
POOL = PagePool(block_size=4, null_block=1000)
MAX_WIDTH = SIZES.num_speculative_tokens + 1


def draft_trees(num_drafts: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Parents of drafts; a chain now and then."""
    return st.tuples(*(st.integers(-1, node - 1) for node in range(num_drafts)))


@st.composite
def scheduled_sequences(draw: st.DrawFn) -> tuple[ScheduledSequence, ...]:
    """Decodes with drafts, short and long last chunks, and chunks that do not sample, with blocks in no order."""
    free = random.Random(draw(st.integers(0, 9))).sample(range(700), 700)
    scheduled = []
    for seq_id in range(draw(st.integers(1, SIZES.max_num_seqs))):
        is_sampling = draw(st.booleans())
        num_drafts = draw(st.integers(0, SIZES.num_speculative_tokens)) if is_sampling else 0
        num_known = 1 if num_drafts else draw(st.integers(1, 9))
        start = draw(st.integers(0, 12) | st.integers(300, 380))
        num_rows = num_known + num_drafts
        num_blocks = -(-(start + num_rows) // POOL.block_size) + draw(st.integers(0, 2))
        scheduled.append(
            ScheduledSequence(
                seq_id=seq_id,
                start=start,
                token_ids=draw(st.lists(st.integers(1, 99), min_size=num_rows, max_size=num_rows)),
                num_draft_tokens=num_drafts,
                is_sampling=is_sampling,
                next_token_id=None if is_sampling else 7,
                max_next_drafts=0,
                block_table=[free.pop() for _ in range(num_blocks)],
                drafter_block_table=(),
                params=SamplingParams(),
                seed=0,
                draft_parents=draw(st.none() | draft_trees(num_drafts)),
            )
        )
    return tuple(scheduled)


def decoding_sequence(seq_id: int, num_drafts: int) -> ScheduledSequence:
    """One known token, and a chain of drafts."""
    return ScheduledSequence(
        seq_id=seq_id,
        start=8,
        token_ids=[5] * (1 + num_drafts),
        num_draft_tokens=num_drafts,
        is_sampling=True,
        next_token_id=None,
        max_next_drafts=0,
        block_table=[4 * seq_id + block for block in range(4)],
        drafter_block_table=(),
        params=SamplingParams(),
        seed=0,
    )


def pack(scheduled: tuple[ScheduledSequence, ...], policy: str) -> InputBatch:
    return build_input_batch(scheduled, POOL, PADDINGS[policy](SIZES), max_width=MAX_WIDTH)


def check_row(section: Section, row: int, sequence: ScheduledSequence | None, offset: int) -> None:
    """Token, position and slot of one row of a section."""
    found = (int(section.input_ids[row]), int(section.positions[row]), int(section.slot_mapping[row]))
    if sequence is None or offset >= len(sequence.token_ids):
        assert found == (0, 0, POOL.null_slot)
        return
    place = sequence.start + offset
    slot = sequence.block_table[place // POOL.block_size] * POOL.block_size + place % POOL.block_size
    assert found == (sequence.token_ids[offset], sequence.start + len(rows_before(sequence, offset)), slot)


def rows_before(sequence: ScheduledSequence, offset: int) -> list[int]:
    """The rows of a sequence that come before one of them in the text."""
    node = offset - sequence.num_known_tokens
    if node < 0 or sequence.draft_parents is None:
        return list(range(offset))
    parent = sequence.num_known_tokens + sequence.draft_parents[node]
    return [*rows_before(sequence, parent), parent]


@pytest.mark.parametrize("policy", PADDINGS)
@given(scheduled=scheduled_sequences())
@settings(deadline=None)
def test_parent_rows_are_there_for_trees_alone(policy: str, scheduled: tuple[ScheduledSequence, ...]) -> None:
    for section in pack(scheduled, policy).sections:
        members = [scheduled[index] for index in section.indices]
        befores = [[rows_before(one, row) for row in range(len(one.token_ids))] for one in members]
        is_chain = all(before == list(range(row)) for rows in befores for row, before in enumerate(rows))
        assert (section.parent_rows is None) == is_chain
        if section.parent_rows is None:
            continue
        width = section.shape.width
        for seq, found in enumerate(section.parent_rows.reshape(-1, width).tolist()):
            rows = befores[seq] if seq < len(members) else []
            wanted = [before[-1] if before else -1 for before in rows] or [-1]
            assert found == wanted + [0] * (width - len(wanted))


@pytest.mark.parametrize("policy", PADDINGS)
@given(scheduled=scheduled_sequences())
@settings(deadline=None)
def test_every_row_is_right(policy: str, scheduled: tuple[ScheduledSequence, ...]) -> None:
    batch = pack(scheduled, policy)
    next_row = 0
    for section in batch.sections:
        assert section.first_row == next_row
        next_row += section.shape.num_rows
        width = section.shape.width
        for seq in range(section.shape.num_seqs):
            sequence = scheduled[section.indices[seq]] if seq < len(section.indices) else None
            for offset in range(width):
                check_row(section, seq * width + offset, sequence, offset)
            num_blocks = 0
            if sequence is not None:
                num_blocks = -(-(sequence.start + len(sequence.token_ids)) // POOL.block_size)
                assert batch.first_rows[section.indices[seq]] == section.first_row + seq * width
            table = [] if sequence is None else list(sequence.block_table[:num_blocks])
            columns = section.block_tables.shape[1]
            assert section.block_tables[seq].tolist() == table + [POOL.null_block] * (columns - num_blocks)


@pytest.mark.parametrize("policy", PADDINGS)
@given(scheduled=scheduled_sequences())
@settings(deadline=None)
def test_sections_hold_every_sequence_once(policy: str, scheduled: tuple[ScheduledSequence, ...]) -> None:
    batch = pack(scheduled, policy)
    decoding = {i for i, s in enumerate(scheduled) if s.is_sampling and len(s.token_ids) <= MAX_WIDTH}
    chunks = [i for i in range(len(scheduled)) if i not in decoding]
    grids = batch.sections[: len(batch.sections) - len(chunks)]
    assert sorted(i for section in grids for i in section.indices) == sorted(decoding)
    assert [section.indices for section in batch.sections[len(grids) :]] == [(i,) for i in chunks]
    assert len(grids) <= 1 or policy == "eager"
    assert batch.is_decode_only == (len(grids) == 1 and not chunks)


def test_a_sequence_with_many_drafts_makes_no_rows_for_the_others() -> None:
    """Where shapes are not captured: a fixed shape is as wide for everybody."""
    scheduled = tuple(decoding_sequence(seq_id, num_drafts) for seq_id, num_drafts in enumerate((0, 3, 0, 0)))
    widths = [(section.shape.width, section.indices) for section in pack(scheduled, "eager").sections]
    assert widths == [(4, (1,)), (1, (0, 2, 3))]
    assert [section.shape.width for section in pack(scheduled, "fixed").sections] == [MAX_WIDTH]


@pytest.mark.parametrize("policy", PADDINGS)
@given(scheduled=scheduled_sequences())
@settings(deadline=None)
def test_logits_rows_are_the_last_known_row_and_the_drafts(
    policy: str, scheduled: tuple[ScheduledSequence, ...]
) -> None:
    batch = pack(scheduled, policy)
    ids = {s.first_row + row: int(s.input_ids[row]) for s in batch.sections for row in range(s.shape.num_rows)}
    assert sorted(s.seq_id for s in batch.sampling) == sorted(s.seq_id for s in scheduled if s.is_sampling)
    assert batch.logit_rows == sorted(batch.logit_rows)
    sampled = batch.sampling
    wanted = [token_id for s in sampled for token_id in s.token_ids[s.num_known_tokens - 1 :]]
    assert [ids[row] for row in batch.logit_rows] == wanted


@given(scheduled=scheduled_sequences())
@settings(deadline=None)
def test_spans_reach_as_far_as_their_sequences(scheduled: tuple[ScheduledSequence, ...]) -> None:
    for section in pack(scheduled, "eager").sections:
        lengths = [scheduled[i].start + len(scheduled[i].token_ids) for i in section.indices]
        counts = [span.num_blocks for span in section.shape.spans for _ in range(span.num_seqs)]
        assert len(counts) == len(lengths)
        assert all(-(-length // POOL.block_size) <= count for length, count in zip(lengths, counts, strict=True))
        assert section.block_tables.shape[1] == counts[0]


@given(scheduled=scheduled_sequences())
@settings(deadline=None)
def test_fixed_grids_are_buckets(scheduled: tuple[ScheduledSequence, ...]) -> None:
    padding = PADDINGS["fixed"](SIZES)
    batch = pack(scheduled, "fixed")
    section = batch.sections[0]
    if batch.is_decode_only:
        assert section.shape.width == MAX_WIDTH
        assert len(section.shape.spans) == 1
        assert section.shape.num_seqs in padding.batch_sizes.sizes
        assert section.shape.spans[0].num_blocks in padding.block_counts.sizes
