"""Mistral: `[TOOL_CALLS]` before a JSON array of calls, or, since 2025, before each name with its arguments.

`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` and `[TOOL_CALLS]name[ARGS]{...}` (some leave `[ARGS]` out). Owns
both. Refuses to know who asked for a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from peagle.text.answer_events import AnswerEvent
from peagle.text.held_text import find_marker
from peagle.text.tool_parsers.call_events import CallEvents, ContentAround
from peagle.text.tool_parsers.call_reader import CallReader, ValueSpan
from peagle.text.tool_parsers.tool_format import CallGrammar, ToolFunction, define_call_objects

BEGIN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_LONGEST_NAME = 256  # characters; what is longer is no name
_BETWEEN = " \t\r\n,"


class MistralFormat:
    """See `ToolFormat`. A grammar holds calls to the array, which all of these models can read."""

    name = "mistral"
    marks = (BEGIN, ARGUMENTS)
    begin = BEGIN

    def parser(self) -> MistralParser:
        """Reads one answer."""
        return MistralParser()

    def define_body(self, grammar: CallGrammar, functions: Sequence[ToolFunction], *, has_several: bool) -> str:
        """An array of objects."""
        call = define_call_objects(grammar, functions)
        more = f" ({json.dumps(', ')} {call})*" if has_several else ""
        return grammar.rule("calls", f"{json.dumps('[')} {call}{more} {json.dumps(']')}")

    def separator(self) -> str | None:
        """One mark for all of them."""
        return None


class MistralParser:
    """See `AnswerParser`."""

    def __init__(self) -> None:
        self._calls = CallEvents()
        self._content = ContentAround()
        self._state = "text"
        self._reader = CallReader()
        self._span = ValueSpan()
        self._held = ""
        self._since_mark = ""  # read since the mark, while it may turn out to be text

    def feed(self, text_delta: str) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        self._held += text_delta
        steps = {
            "text": self._read_text,
            "begin": self._read_begin,
            "name": self._read_name,
            "named_arguments": self._read_named_arguments,
            "between": self._read_between,
            "object": self._read_object,
        }
        events: list[AnswerEvent] = []
        while self._held:
            before = (len(self._held), self._state)
            events += steps[self._state]()
            if (len(self._held), self._state) == before:
                break
        return events

    def finish(self) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        events: list[AnswerEvent] = []
        if self._state in ("begin", "name"):
            self._held = BEGIN + self._since_mark + self._held
            events += self._content.say(self._held)
        elif self._state == "object" and self._reader.name is None and not self._calls.num_calls:
            events += self._content.say(BEGIN + self._since_mark + self._reader.raw)
        elif self._state == "text":
            events += self._content.say(self._held)
        return [*events, *self._content.finish()]

    def _read_text(self) -> list[AnswerEvent]:
        found = find_marker(self._held, (BEGIN,))
        self._held = found.rest
        if found.marker is not None:
            self._state, self._since_mark = "begin", ""
        return self._content.say(found.before)

    def _read_begin(self) -> list[AnswerEvent]:
        stripped = self._held.lstrip()
        self._since_mark += self._held[: len(self._held) - len(stripped)]
        self._held = stripped
        if stripped.startswith("["):
            self._since_mark += "["
            self._held, self._state = stripped[1:], "between"
        elif stripped:
            self._state = "name"
        return []

    def _read_name(self) -> list[AnswerEvent]:
        found = find_marker(self._held, (ARGUMENTS, "{"))
        is_too_long = len(found.before) > _LONGEST_NAME
        if found.marker is None and not is_too_long:
            return []
        name = found.before.strip()
        if not name or found.marker is None or is_too_long:
            self._state = "text"
            text, self._held = BEGIN + self._since_mark + found.before + (found.marker or ""), found.rest
            return self._content.say(text)
        self._held = found.rest if found.marker == ARGUMENTS else "{" + found.rest
        self._state, self._span = "named_arguments", ValueSpan()
        self._content.call()
        return self._calls.begin(name)

    def _read_named_arguments(self) -> list[AnswerEvent]:
        if not self._span.has_begun:
            self._held = self._held.lstrip()
        for place, char in enumerate(self._held):
            if self._span.ends_with(char):
                text, self._held = self._held[: place + 1], self._held[place + 1 :]
                self._state = "text"
                self._calls.end()
                return self._calls.arguments(text)
        text, self._held = self._held, ""
        return self._calls.arguments(text)

    def _read_between(self) -> list[AnswerEvent]:
        stripped = self._held.lstrip(_BETWEEN)
        self._since_mark += self._held[: len(self._held) - len(stripped)]
        self._held = stripped
        if stripped.startswith("{"):
            self._state, self._reader = "object", CallReader()
        elif stripped.startswith("]"):
            self._state, self._held = "text", stripped[1:]
        elif stripped:
            return self._give_up("")
        return []

    def _read_object(self) -> list[AnswerEvent]:
        self._held = self._reader.feed(self._held)
        if self._reader.has_failed:
            return self._give_up(self._reader.raw)
        if self._reader.name is not None:
            self._content.call()
        events = self._calls.of(self._reader)
        if self._reader.is_done:
            self._state = "between"
        return events

    def _give_up(self, raw: str) -> list[AnswerEvent]:
        """What follows is no call; if there was none before, the mark and all behind it are text."""
        self._state = "text"
        return self._content.say(raw if self._calls.num_calls else BEGIN + self._since_mark + raw)
