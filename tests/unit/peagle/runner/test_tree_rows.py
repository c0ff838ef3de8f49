"""Rows of trees, and the way of an accepted path to where a chain's drafts lie."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.outputs import ScheduledSequence
from peagle.runner.tree_rows import accepted_moves, draft_depths, is_tree, parent_rows, row_positions
from peagle.sampling_params import SamplingParams
from tests.builders.draft_history import path_to

BLOCK_SIZE = 4


def scheduled(parents: list[int] | None, *, num_drafts: int, num_known: int = 1, start: int = 6) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=0,
        start=start,
        token_ids=list(range(num_known + num_drafts)),
        num_draft_tokens=num_drafts,
        is_sampling=True,
        next_token_id=None,
        max_next_drafts=0,
        block_table=[9, 2, 30, 4, 17, 6, 25, 8, 3],
        drafter_block_table=(),
        params=SamplingParams(),
        seed=0,
        draft_parents=parents,
    )


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 12)))]


def test_a_bushy_tree() -> None:
    sequence = scheduled([-1, -1, 0, 0, 1, 4], num_drafts=6, num_known=2)
    assert draft_depths(sequence) == [1, 1, 2, 2, 2, 3]
    assert row_positions(sequence) == [6, 7, 8, 8, 9, 9, 9, 10]
    assert parent_rows(sequence) == [-1, 0, 1, 1, 2, 2, 3, 6]
    assert is_tree(sequence)


@given(num_drafts=st.integers(0, 8), num_known=st.integers(1, 5), is_told=st.booleans())
def test_a_chain_is_no_tree_even_if_its_parents_are_named(num_drafts: int, num_known: int, is_told: bool) -> None:
    parents = list(range(-1, num_drafts - 1)) if is_told else None
    sequence = scheduled(parents, num_drafts=num_drafts, num_known=num_known)
    num_rows = num_known + num_drafts
    assert not is_tree(sequence)
    assert row_positions(sequence) == list(range(6, 6 + num_rows))
    assert parent_rows(sequence) == list(range(-1, num_rows - 1))
    assert accepted_moves(sequence, range(num_drafts), BLOCK_SIZE).sources == []


@settings(deadline=None)
@given(parents=trees(), num_known=st.integers(1, 3), data=st.data())
def test_the_accepted_path_ends_up_behind_the_known_rows(
    parents: list[int], num_known: int, data: st.DataObject
) -> None:
    sequence = scheduled(parents, num_drafts=len(parents), num_known=num_known)
    path = path_to(data.draw(st.integers(-1, len(parents) - 1)), parents)

    def slot(row: int) -> int:
        place = sequence.start + row
        return sequence.block_table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE

    memory = {slot(row): row for row in range(len(sequence.token_ids))}  # what each slot holds: the row itself
    moves = accepted_moves(sequence, path, BLOCK_SIZE)
    moved = [memory[source] for source in moves.sources]
    memory |= dict(zip(moves.destinations, moved, strict=True))
    wanted = [*range(num_known), *(num_known + node for node in path)]
    assert [memory[slot(row)] for row in range(len(wanted))] == wanted
