"""One answer to a conversation as it is read: text, reasoning, tool calls.

Owns the state of one choice between the engine's outputs and the message that a client gets. Refuses to know what
chunks and messages look like (`chat_answers`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peagle import RequestOutput
from peagle.text import (
    AnswerEvent,
    AnswerParser,
    ContentDelta,
    ReasoningDelta,
    Tokenizer,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(slots=True, kw_only=True)
class AnswerReader:
    """Reads one choice.

    Attributes:
        parser: of the answer; None if it is text and nothing else.
        has_several: more than one call is wanted; further ones are dropped if not.
        has_calls: a call has begun.
    """

    parser: AnswerParser | None = None
    has_several: bool = True
    has_calls: bool = False
    _reasoning: list[str] = field(default_factory=list)

    def read(self, output: RequestOutput) -> list[AnswerEvent]:
        """What the output adds to the answer."""
        if self.parser is None:
            return [ContentDelta(output.text)] if output.text else []
        events = self.parser.feed(output.text)
        if output.is_finished:
            events += self.parser.finish()
        return [event for event in events if self._is_wanted(event)]

    def num_reasoning_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens of the reasoning's text. Counted anew, so that it does not matter in which steps they came."""
        text = "".join(self._reasoning)
        return len(tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def _is_wanted(self, event: AnswerEvent) -> bool:
        if isinstance(event, ReasoningDelta):
            self._reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            self.has_calls = True
        return self.has_several or not isinstance(event, ToolCallStart | ToolCallArguments) or event.index == 0


@dataclass(slots=True)
class Message:
    """A whole message, put together from its events."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallStart] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)

    def add(self, events: list[AnswerEvent]) -> None:
        """Take what an output adds."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content.append(text)
                case ReasoningDelta(text):
                    self.reasoning.append(text)
                case ToolCallStart():
                    self.calls.append(event)
                    self.arguments.append([])
                case ToolCallArguments(index, delta):
                    self.arguments[index].append(delta)
