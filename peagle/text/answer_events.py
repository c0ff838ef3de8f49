"""What a parser finds in the text of an answer, and the parser that finds nothing but text.

Owns the vocabulary between the parsers of answers (tool calls, reasoning) and whoever writes them down. Refuses to know
tokens, requests and HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text that the answer says."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON of a tool call's arguments; all pieces of one index, joined, are valid JSON."""

    index: int
    delta: str


AnswerEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class AnswerParser(Protocol):
    """Reads one answer, in pieces of any size: how it is cut into pieces must not show in the events, joined."""

    def feed(self, text_delta: str) -> list[AnswerEvent]:
        """What became certain with this piece of text."""
        ...

    def finish(self) -> list[AnswerEvent]:
        """The answer has ended: what was still held back. Called once."""
        ...


class PlainAnswer:
    """The parser of answers that are text and nothing else."""

    def feed(self, text_delta: str) -> list[AnswerEvent]:
        """The text itself."""
        return [ContentDelta(text_delta)] if text_delta else []

    def finish(self) -> list[AnswerEvent]:
        """Nothing is ever held back."""
        return []
