"""How a configuration group is written down: fields with help texts, and errors that name the nearest key.

Owns these two. Refuses to know any group.
"""

from __future__ import annotations

import difflib
from dataclasses import field
from typing import Any


def option(default: Any, help_text: str) -> Any:
    """A configuration field with its help text (shown by `peagle serve --help`)."""
    return field(default=default, metadata={"help": help_text})


def unknown_key_message(key: str, known: list[str], where: str) -> str:
    """The text of an unknown-key error, naming the nearest known key."""
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known keys: {', '.join(known)}"
    return f"unknown key {key!r} in {where}{hint}"
