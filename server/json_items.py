"""How many values a JSON body holds, before it is checked field by field.

Checking costs a microsecond or more a value, on the event loop, so a few megabytes of tiny values would stop every
stream for seconds. Reading them without checking is ten times as fast. Owns the count and its limit. Refuses to know
what the values mean.
"""

from __future__ import annotations

from typing import Any

import orjson

from peagle.errors import InvalidParameterError

LARGE_BODY_BYTES = 64 * 2**10  # below it there is no room for many values
MAX_ITEMS = 50_000


def refuse_too_many_items(body: bytes) -> None:
    """Let a body pass that can be checked in a moment; what is no JSON passes too, the check will say so.

    Raises:
        InvalidParameterError: it has more than `MAX_ITEMS` values, counting those inside lists and objects.
    """
    try:
        waiting: list[Any] = [orjson.loads(body)]
    except orjson.JSONDecodeError:
        return
    num_items = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            inner = list(value.values())
        elif isinstance(value, list):
            inner = value
        else:
            continue
        num_items += len(inner)
        if num_items > MAX_ITEMS:
            raise InvalidParameterError(f"The body has more than {MAX_ITEMS} values in its lists and objects.")
        waiting += [one for one in inner if isinstance(one, dict | list)]
