"""Hermes and Qwen: `<tool_call>` around a JSON object, once for each call, text before and between them.

Owns this format. Refuses to know who asked for a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from peagle.text.answer_events import AnswerEvent
from peagle.text.held_text import find_marker
from peagle.text.tool_parsers.call_events import CallEvents, ContentAround
from peagle.text.tool_parsers.call_reader import CallReader
from peagle.text.tool_parsers.tool_format import CallGrammar, ToolFunction, define_call_objects

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesFormat:
    """See `ToolFormat`."""

    name = "hermes"
    marks = (BEGIN, END)
    begin = BEGIN

    def parser(self) -> HermesParser:
        """Reads one answer."""
        return HermesParser()

    def define_body(self, grammar: CallGrammar, functions: Sequence[ToolFunction], *, has_several: bool) -> str:
        """One object and the end mark."""
        line = json.dumps("\n")
        return grammar.rule("call", f"{line} {define_call_objects(grammar, functions)} {line} {grammar.mark(END)}")

    def separator(self) -> str | None:
        """Each call has a line of its own."""
        return "\n"


class HermesParser:
    """See `AnswerParser`."""

    def __init__(self) -> None:
        self._calls = CallEvents()
        self._content = ContentAround()
        self._reader: CallReader | None = None  # of the call that is being read
        self._held = ""
        self._awaits_end = False

    def feed(self, text_delta: str) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        self._held += text_delta
        events: list[AnswerEvent] = []
        while self._held:
            left = len(self._held)
            if self._awaits_end:
                self._skip_to_end()
            elif self._reader is not None:
                events += self._read_call(self._reader)
            else:
                events += self._read_text()
            if len(self._held) == left:
                break
        return events

    def finish(self) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        events: list[AnswerEvent] = []
        if self._reader is not None and self._reader.name is None:
            events += self._give_up(self._reader)
        if not self._awaits_end:
            events += self._content.say(self._held)
        return [*events, *self._content.finish()]

    def _read_text(self) -> list[AnswerEvent]:
        found = find_marker(self._held, (BEGIN,))
        events = self._content.say(found.before)
        self._held = found.rest
        if found.marker is not None:
            self._reader = CallReader()
        return events

    def _read_call(self, reader: CallReader) -> list[AnswerEvent]:
        self._held = reader.feed(self._held)
        if reader.has_failed:
            return self._give_up(reader)
        if reader.name is not None:
            self._content.call()
        events = self._calls.of(reader)
        if reader.is_done:
            self._reader, self._awaits_end = None, True
        return events

    def _give_up(self, reader: CallReader) -> list[AnswerEvent]:
        """It is no call: all of it was text."""
        self._reader = None
        return self._content.say(BEGIN + reader.raw)

    def _skip_to_end(self) -> None:
        """Some models leave the end mark out, and begin the next call."""
        found = find_marker(self._held, (END, BEGIN))
        if found.marker is not None:
            self._awaits_end = False
            self._held = found.rest if found.marker == END else BEGIN + found.rest
        else:
            self._held = found.rest
