"""Hides secrets in text that people will see: printed configurations, errors, logs.

Owns what counts as a secret: a key that is named like one, and the user part of a URL. Refuses to know configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(r"(?:^|_)(?:key|token|secret|password)$")
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def masked(name: str, value: Any) -> Any:
    """`value` with every secret replaced, looking into lists and mappings. `name` is the key that holds it."""
    if isinstance(value, Mapping):
        return {inner: masked(str(inner), item) for inner, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(name, item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if _SECRET_NAME.search(name.lower()):
        return MASK
    return _URL_USER.sub(MASK, value) if isinstance(value, str) else value
