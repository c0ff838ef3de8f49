from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peagle.scheduler.draft_budget import draft_allowance, shorten_drafts


def shorten_one_by_one(num_drafts: list[int], allowance: int) -> list[int]:
    """The slow reference: take one draft from the longest proposal, the last of equals, until all fit."""
    shortened = list(num_drafts)
    while sum(shortened) > allowance:
        longest = max(shortened)
        index = max(i for i, num in enumerate(shortened) if num == longest)
        shortened[index] -= 1
    return shortened


@given(st.lists(st.integers(0, 7), max_size=12), st.integers(0, 60))
def test_shortening_equals_the_reference(num_drafts: list[int], allowance: int) -> None:
    assert shorten_drafts(num_drafts, allowance) == shorten_one_by_one(num_drafts, allowance)


def test_shallow_drafts_survive_deep_ones() -> None:
    assert shorten_drafts([5, 1, 5], 6) == [3, 1, 2]
    assert shorten_drafts([5, 1, 5], 0) == [0, 0, 0]


@given(st.integers(0, 600), st.integers(0, 3000))
def test_prefill_keeps_half_of_the_room(room: int, demand: int) -> None:
    allowance = draft_allowance(room, prefill_demand=demand)
    assert 0 <= allowance <= room
    for_prefill = room - allowance
    assert for_prefill <= demand
    assert for_prefill == demand or 2 * for_prefill in (room, room + 1)
    if room and demand:
        assert for_prefill >= 1
