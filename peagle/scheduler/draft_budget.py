"""How many drafts a step may verify when the token budget is tight.

Drafts are optional work: leaving them out costs speed, never correctness. So known tokens of decodes come first, then
prefill gets its share, and drafts are shortened. Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


def draft_allowance(room: int, *, prefill_demand: int) -> int:
    """Drafts that a step may verify in all.

    `room` is the budget left once every decode has its one known token. While `prefill_demand` tokens of prefill want
    to run they keep half of the room, rounded up, or all they want if that is less. With a budget of at least
    `max_num_seqs` a prefill means a room of at least 1, so a stream of decodes never stops a prefill.
    """
    return room - min(prefill_demand, (room + 1) // 2)


def shorten_drafts(num_drafts: SequenceOf[int], allowance: int) -> list[int]:
    """Shorten proposals until they fit `allowance` in all, the longest ones first.

    A deep draft is accepted only if all before it are, so it is worth less than a shallow one of another sequence:
    everyone keeps the same depth, and what is left over deepens the first ones by one.
    """
    if sum(num_drafts) <= allowance:
        return list(num_drafts)
    depth = 0
    left = allowance
    while (num_deeper := sum(num > depth for num in num_drafts)) <= left:
        left -= num_deeper
        depth += 1
    shortened = []
    for num in num_drafts:
        deepened = int(num > depth and left > 0)
        left -= deepened
        shortened.append(min(num, depth) + deepened)
    return shortened
