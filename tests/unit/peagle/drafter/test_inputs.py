from __future__ import annotations

from typing import Any

import pytest
import torch

from peagle.drafter.inputs import DraftShape, SlotRules, build_inputs
from peagle.drafter.interface import DraftBatch
from peagle.outputs import ScheduledSequence
from peagle.sampling_params import SamplingParams

MASK, NULL = 99, 40
RULES = SlotRules(num_speculative_tokens=3, mask_token_id=MASK, block_size=4, null_slot=NULL, max_model_len=32)


def scheduled(start: int, token_ids: list[int], **fields: Any) -> ScheduledSequence:
    defaults: dict[str, Any] = {
        "seq_id": 0,
        "num_draft_tokens": 0,
        "is_sampling": True,
        "next_token_id": None,
        "max_next_drafts": 3,
        "block_table": [],
        "drafter_block_table": list(range(8)),
        "params": SamplingParams(),
        "seed": 0,
    }
    return ScheduledSequence(start=start, token_ids=token_ids, **(defaults | fields))


def batch_of(*parts: tuple[ScheduledSequence, list[int]], num_rows: int = 50) -> DraftBatch:
    first_rows, row = [], 0
    for sequence, _ in parts:
        first_rows.append(row)
        row += len(sequence.token_ids)
    return DraftBatch(
        scheduled=tuple(sequence for sequence, _ in parts),
        output_token_ids=[emitted for _, emitted in parts],
        features=torch.zeros(num_rows, 1),
        first_rows=first_rows,
    )


def test_accepted_tokens_come_before_the_mask_slots() -> None:
    # rows: token 5 and three drafts, of which 6 and 7 were accepted; 8 was drawn instead of 1
    sequence = scheduled(6, [5, 6, 7, 1], num_draft_tokens=3, drafter_block_table=[3, 2, 1, 0])
    inputs = build_inputs(batch_of((sequence, [6, 7, 8])), RULES)
    assert inputs.token_ids.tolist() == [6, 7, 8, MASK, MASK]
    assert inputs.feature_rows.tolist() == [0, 1, 2, 50, 50]
    assert inputs.grids[0].positions.tolist() == [[6, 7, 8, 9, 10]]
    assert inputs.slot_mapping.tolist() == [10, 11, 4, 5, 6]
    assert inputs.grids[0].block_tables.tolist() == [[3, 2, 1]]
    assert inputs.logits_rows.tolist() == [[2, 3, 4]]


def test_all_rejected() -> None:
    sequence = scheduled(6, [5, 6, 7, 1], num_draft_tokens=3)
    inputs = build_inputs(batch_of((sequence, [8])), RULES)
    assert inputs.token_ids.tolist() == [8, MASK, MASK]
    assert inputs.feature_rows.tolist() == [0, 50, 50]
    assert inputs.grids[0].positions.tolist() == [[6, 7, 8]]


def test_chunk_ends_with_the_next_known_token() -> None:
    sequence = scheduled(4, [10, 11, 12], is_sampling=False, next_token_id=13, max_next_drafts=0)
    inputs = build_inputs(batch_of((sequence, [])), RULES)
    assert inputs.token_ids.tolist() == [11, 12, 13]
    assert inputs.feature_rows.tolist() == [0, 1, 2]
    assert inputs.drafting == ()
    assert inputs.logits_rows.shape == (0, 3)


def test_last_chunk_drafts() -> None:
    inputs = build_inputs(batch_of((scheduled(0, [10, 11, 12]), [13])), RULES)
    assert inputs.token_ids.tolist() == [11, 12, 13, MASK, MASK]
    assert inputs.logits_rows.tolist() == [[2, 3, 4]]


def test_sequences_of_similar_width_share_a_grid() -> None:
    decode = scheduled(6, [5, 6], num_draft_tokens=1)
    shorter = scheduled(2, [5])
    quiet = scheduled(2, [5], max_next_drafts=0)
    long_chunk = scheduled(0, list(range(9)), is_sampling=False, next_token_id=9)
    twin = scheduled(8, list(range(9)), is_sampling=False, next_token_id=9)
    batch = batch_of((decode, [6, 7]), (long_chunk, []), (quiet, [8]), (twin, []), (shorter, [8]))
    inputs = build_inputs(batch, RULES)
    long, short, plain = inputs.grids
    assert (long.first_row, short.first_row, plain.first_row) == (0, 18, 26)
    assert long.positions[:, 0].tolist() == [0, 8]
    assert inputs.feature_rows[:18].tolist() == [*range(2, 11), *range(12, 21)]
    assert short.positions.tolist() == [[6, 7, 8, 9], [2, 3, 4, 0]]
    assert inputs.slot_mapping[22:26].tolist() == [2, 3, 4, NULL]
    assert inputs.token_ids[18:26].tolist() == [6, 7, MASK, MASK, 8, MASK, MASK, MASK]
    assert inputs.feature_rows[18:26].tolist() == [0, 1, 50, 50, 21, 50, 50, 50]
    assert short.block_tables.tolist() == [[0, 1, 2], [0, 1, NULL // 4]]
    assert plain.positions.tolist() == [[2]]
    assert inputs.drafting == (0, 4)
    assert inputs.logits_rows.tolist() == [[19, 20, 21], [22, 23, 24]]


def test_fewer_drafts_than_k() -> None:
    sequence = scheduled(6, [5], max_next_drafts=2)
    inputs = build_inputs(batch_of((sequence, [6])), RULES)
    assert inputs.token_ids.tolist() == [6, MASK]
    assert inputs.logits_rows.tolist() == [[0, 1]]
    assert inputs.num_drafts == (2,)
    assert not inputs.unasked.any()


def test_unequal_numbers_of_drafts() -> None:
    """As many logits as the most drafts that anyone asks for; at a fixed shape always K."""
    few, many = scheduled(6, [5], max_next_drafts=1), scheduled(6, [5], max_next_drafts=2)
    inputs = build_inputs(batch_of((few, [6]), (many, [6])), RULES)
    newest, masked = inputs.logits_rows[1].tolist()
    assert inputs.logits_rows.tolist() == [[inputs.logits_rows[0, 0]] * 2, [newest, newest + 1]]
    assert masked == newest + 1
    assert inputs.unasked.tolist() == [[False, True], [False, False]]
    fixed = build_inputs(batch_of((few, [6]), (many, [6])), RULES, DraftShape(num_seqs=2, width=6, num_blocks=4))
    assert fixed.logits_rows.tolist() == [[0, 0, 0], [6, 7, 6]]


@pytest.mark.parametrize(("start", "num_slots"), [(28, 3), (30, 2), (31, 1)])
def test_no_slot_past_the_longest_sequence(start: int, num_slots: int) -> None:
    inputs = build_inputs(batch_of((scheduled(start, [5]), [6])), RULES)
    assert inputs.grids[0].positions.tolist() == [list(range(start, start + num_slots))]


def test_failed_sequence_is_left_out() -> None:
    inputs = build_inputs(batch_of((scheduled(4, [1]), []), (scheduled(6, [5]), [6])), RULES)
    assert inputs.token_ids.tolist() == [6, MASK, MASK]
    assert inputs.feature_rows[0] == 1
    assert inputs.drafting == (1,)
    nothing = build_inputs(batch_of((scheduled(4, [1]), [])), RULES)
    assert nothing.token_ids.shape == (0,)
    assert nothing.logits_rows.shape == (0, 3)


def test_fixed_shape() -> None:
    sequence = scheduled(6, [5, 6], num_draft_tokens=1)
    batch = batch_of((sequence, [6, 7]), (scheduled(2, [5]), [8]))
    inputs = build_inputs(batch, RULES, DraftShape(num_seqs=4, width=6, num_blocks=5))
    (grid,) = inputs.grids
    assert grid.positions.tolist() == [[6, 7, 8, 9, 0, 0], [2, 3, 4, 0, 0, 0], [0] * 6, [0] * 6]
    assert grid.block_tables.shape == (4, 5)
    assert inputs.slot_mapping.tolist() == [6, 7, 8, 9, NULL, NULL, 2, 3, 4, *[NULL] * 15]
    assert inputs.logits_rows.tolist() == [[1, 2, 3], [6, 7, 8], [0, 0, 0], [0, 0, 0]]
    assert inputs.drafting == (0, 1)
