"""The rows of a sequence whose drafts are a tree.

Rows are packed as those of a chain: the known ones, then one for each draft (*node*), in order, and each row's key has
its own slot in that order. But a node's position goes by its depth, and the row before it in the text is its parent's.
Once verified, the accepted path is moved to the slots where a chain's accepted drafts lie; the others are free again.

Owns this arithmetic, in plain integers. Refuses to know how trees are drafted and verified.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from peagle.outputs import ScheduledSequence

_ROOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMoves:
    """Keys and values to be moved, as flat slots."""

    sources: list[int]
    destinations: list[int]


def draft_parents(scheduled: ScheduledSequence) -> SequenceOf[int]:
    """The parent of each draft among the drafts, -1 for the last known token; a chain's is the draft before."""
    if scheduled.draft_parents is None:
        return range(_ROOT, scheduled.num_draft_tokens - 1)
    assert len(scheduled.draft_parents) == scheduled.num_draft_tokens
    return scheduled.draft_parents


def is_tree(scheduled: ScheduledSequence) -> bool:
    """Whether the drafts are anything but a chain."""
    return any(parent != node - 1 for node, parent in enumerate(draft_parents(scheduled)))


def draft_depths(scheduled: ScheduledSequence) -> list[int]:
    """How far each draft is from the last known token, 1 for its children."""
    depths: list[int] = []
    for parent in draft_parents(scheduled):
        depths.append(1 if parent == _ROOT else depths[parent] + 1)
    return depths


def row_positions(scheduled: ScheduledSequence) -> list[int]:
    """Absolute position of each row."""
    last_known = scheduled.start + scheduled.num_known_tokens - 1
    return [*range(scheduled.start, last_known + 1), *(last_known + depth for depth in draft_depths(scheduled))]


def parent_rows(scheduled: ScheduledSequence) -> list[int]:
    """The row before each row in the text, -1 for the first one."""
    num_known = scheduled.num_known_tokens
    return [*range(-1, num_known - 1), *(num_known + parent for parent in draft_parents(scheduled))]


def accepted_moves(scheduled: ScheduledSequence, accepted_nodes: SequenceOf[int], block_size: int) -> SlotMoves:
    """What has to be moved so that the accepted path lies behind the known rows, one slot each.

    Args:
        scheduled: the verified rows.
        accepted_nodes: the path from the last known token, ascending.
        block_size: tokens in a block.
    """
    first = scheduled.start + scheduled.num_known_tokens

    def slot(place: int) -> int:
        block = scheduled.block_table[(first + place) // block_size]
        return block * block_size + (first + place) % block_size

    pairs = [(slot(node), slot(depth)) for depth, node in enumerate(accepted_nodes) if node != depth]
    return SlotMoves(sources=[source for source, _ in pairs], destinations=[place for _, place in pairs])
