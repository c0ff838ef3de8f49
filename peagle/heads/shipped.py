"""Which draft heads ship with the package, and for which checkpoint each was trained.

A head's directory holds the files of a published head and `card.json`: the checkpoint it belongs to, in the words of
that checkpoint's own receipt (`source.json`), and how the head was made. Owns finding them. Refuses to read weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

CARD = "card.json"
RECEIPT = "source.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedHead:
    """One head of the package. `name` is what `speculative_config.model` may call it."""

    name: str
    directory: Path
    receipt: dict[str, Any]  # of the checkpoint it was trained for


def shipped_heads(root: Path | None = None) -> tuple[ShippedHead, ...]:
    """All of them, by name.

    Args:
        root: directory of the heads' directories; None: the package's.
    """
    cards = sorted((root or Path(__file__).parent).glob(f"*/{CARD}"))
    return tuple(
        ShippedHead(
            name=card.parent.name,
            directory=card.parent,
            receipt=json.loads(card.read_text(encoding="utf-8"))["target"],
        )
        for card in cards
    )


def expected_survivals(directory: Path) -> tuple[float, ...]:
    """How likely it is that the first i + 1 drafts of a head survive, as its card says; empty without a card."""
    try:
        card = json.loads((directory / CARD).read_text(encoding="utf-8"))
        rates = [float(rate) for rate in card["acceptance"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(accumulate(rates, mul))


def head_for(checkpoint: Path, heads: tuple[ShippedHead, ...]) -> ShippedHead | None:
    """The head that was trained for these very weights; None if none was, or the checkpoint does not say what it is."""
    try:
        receipt = json.loads((checkpoint / RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return next((head for head in heads if head.receipt == receipt), None)
