"""Events of the calls of one answer: their numbers, their ids, and their arguments in pieces.

Owns the counting. Refuses to know how calls are found in a text.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from peagle.text.answer_events import AnswerEvent, ContentDelta, ToolCallArguments, ToolCallStart
from peagle.text.tool_parsers.call_reader import CallReader


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class CallEvents:
    """Counts the calls of one answer."""

    num_calls: int = 0
    _is_open: bool = False

    def begin(self, name: str) -> list[AnswerEvent]:
        """A call of `name` begins."""
        self.num_calls += 1
        self._is_open = True
        return [ToolCallStart(index=self.num_calls - 1, id=new_call_id(), name=name)]

    def arguments(self, text: str) -> list[AnswerEvent]:
        """More of the arguments of the call that began last."""
        return [ToolCallArguments(index=self.num_calls - 1, delta=text)] if text else []

    def end(self) -> None:
        """The call that began last is over."""
        self._is_open = False

    def of(self, reader: CallReader) -> list[AnswerEvent]:
        """What is new of a call that is being read."""
        events: list[AnswerEvent] = []
        if not self._is_open and reader.name is not None and reader.has_news:
            events += self.begin(reader.name)
        if self._is_open:
            events += self.arguments(reader.take_arguments())
        if reader.is_done:
            self.end()
        return events


@dataclass(slots=True)
class ContentAround:
    """The text around calls. White space beside a call belongs to nobody; within a text it stays."""

    _spaces: str = ""
    _drops: bool = False  # a call was just before

    def say(self, text: str) -> list[AnswerEvent]:
        """Text that is no call."""
        if self._drops:
            text = text.lstrip()
        if not text:
            return []
        self._drops = False
        text = self._spaces + text
        said = text.rstrip()
        self._spaces = text[len(said) :]
        return [ContentDelta(said)] if said else []

    def call(self) -> None:
        """A call begins or has ended: the white space before and behind it is dropped."""
        self._spaces, self._drops = "", True

    def finish(self) -> list[AnswerEvent]:
        """The answer has ended: its white space was part of it, if no call was."""
        spaces, self._spaces = self._spaces, ""
        return [ContentDelta(spaces)] if spaces else []
