"""What is asked: the prompts, their order, and the request body around each.

Owns reading prompts and turning them into chat-completion bodies. Refuses to know HTTP and time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.benchmark import BenchmarkError

Messages = list[dict[str, Any]]

# Fields that carry the measurement itself; a caller who changes them measures something else without noticing.
RESERVED_FIELDS = frozenset({"model", "messages", "stream", "stream_options", "n"})

BUILT_IN_PROMPTS = (
    "Explain to a ten-year-old why the sea is salty while most rivers are not.",
    "Write a short letter to a neighbour whose dog has dug up your tulips. Stay friendly.",
    "List five things to check before buying a used bicycle, with one sentence about each.",
    "A train leaves at 9:40 and arrives at 13:05 with one stop of 12 minutes. How long was it moving?",
    "Write a Python function that returns the longest word of a sentence, and explain how it works.",
    "Summarise the story of Icarus in four sentences, then give its lesson in one.",
    "What is the difference between weather and climate?",
    "Translate into French: The library closes at six, but the reading room stays open until eight.",
    "Plan a weekend of rain for two people who like maps, soup and old films.",
    "Name three advantages and three drawbacks of working at night.",
    "Describe how a lock on a canal lifts a boat, step by step.",
    "Write a SQL query that finds customers without an order in the last ninety days.",
    "Give a recipe for lentil soup for four people.",
    "Why does bread dough rise? Mention yeast, sugar and gluten.",
    "Tell a story in about a hundred words that ends with the sentence: And the door was open all along.",
    "Compare a bubble sort with a merge sort for someone who has just learnt to program.",
)


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How every answer is generated. `extra_body` fields are added last and win over the ones set here."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reserved = sorted(RESERVED_FIELDS & self.extra_body.keys())
        if reserved:
            raise BenchmarkError(f"--extra-body cannot set {', '.join(reserved)}: the measurement depends on them")

    def body(self, messages: Messages, *, model: str, index: int) -> dict[str, Any]:
        """The body of prompt number `index`, which gets the same seed in each round and at each server."""
        body: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self.extra_body}


def built_in_prompts() -> list[Messages]:
    """A few prompts of our own, so that a first measurement needs no file."""
    return [_user_says(text) for text in BUILT_IN_PROMPTS]


def read_prompts(path: Path) -> list[Messages]:
    """Read a JSONL file whose rows have `messages`, `prompt`, or mt_bench's `turns`.

    Only the first turn is asked, since the second one would need the model's answer; assistant messages that end a
    conversation are recorded answers and are not sent. Raises `BenchmarkError` naming the line that fits none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"cannot read the data set {path}: {error}") from error
    prompts = [_parse_row(line, where=f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BenchmarkError(f"the data set {path} has no rows")
    return prompts


def choose_prompts(prompts: Sequence[Messages], *, num_prompts: int, seed: int) -> list[Messages]:
    """`num_prompts` prompts in an order that only `seed` decides. Every prompt is used once before any is used again
    (repeats meet the server's prefix cache, so the report states the number of distinct prompts).
    """
    shuffler = random.Random(seed)
    chosen: list[Messages] = []
    while len(chosen) < num_prompts:
        chosen += shuffler.sample(prompts, len(prompts))
    return chosen[:num_prompts]


def check_sendable(value: object) -> None:
    """Raise `ValueError` for what `json.loads` reads but no request can carry: NaN, infinity, half a surrogate pair."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _user_says(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _parse_row(line: str, *, where: str) -> Messages:
    try:
        row = json.loads(line)
        check_sendable(row)
    except ValueError as error:
        raise BenchmarkError(f"{where}: not usable as JSON: {error}") from error
    match row:
        case {"messages": [*messages]} if all(isinstance(message, dict) for message in messages):
            while messages and messages[-1].get("role") == "assistant":
                messages = messages[:-1]
            if messages:
                return messages
        case {"prompt": str() as text} | {"turns": [str() as text, *_]} if text:
            return _user_says(text)
    raise BenchmarkError(
        f"{where}: a row needs 'messages' (a list), 'prompt' (a string) or 'turns' (a list of strings)"
    )
