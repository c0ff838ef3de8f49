"""Llama 3: the answer is a JSON object, perhaps behind `<|python_tag|>`; several are parted by semicolons.

Owns this format. An answer that begins in any other way is text. Refuses to know who asked for a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from peagle.text.answer_events import AnswerEvent, ContentDelta
from peagle.text.tool_parsers.call_events import CallEvents
from peagle.text.tool_parsers.call_reader import CallReader
from peagle.text.tool_parsers.tool_format import CallGrammar, ToolFunction, define_call_objects

PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;,"


class Llama3JsonFormat:
    """See `ToolFormat`."""

    name = "llama3_json"
    marks = (PYTHON_TAG,)
    begin = None

    def parser(self) -> Llama3JsonParser:
        """Reads one answer."""
        return Llama3JsonParser()

    def define_body(self, grammar: CallGrammar, functions: Sequence[ToolFunction], *, has_several: bool) -> str:
        """Objects, with `parameters` for the arguments."""
        call = define_call_objects(grammar, functions, arguments_key="parameters")
        return grammar.rule("calls", f"{call} ({json.dumps('; ')} {call})*" if has_several else call)

    def separator(self) -> str | None:
        """There is no mark."""
        return None


class Llama3JsonParser:
    """See `AnswerParser`."""

    def __init__(self) -> None:
        self._calls = CallEvents()
        self._reader: CallReader | None = None
        self._held = ""
        self._is_text = False

    def feed(self, text_delta: str) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        if self._is_text:
            return [ContentDelta(text_delta)] if text_delta else []
        self._held += text_delta
        events: list[AnswerEvent] = []
        while self._held and not self._is_text:
            if self._reader is None and not self._begins_call():
                break
            events += self._read_call()
        if self._is_text and self._held:
            events.append(ContentDelta(self._held))
            self._held = ""
        return events

    def finish(self) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        text, self._held = self._held, ""
        if self._reader is not None and self._reader.name is None:
            text = self._reader.raw + text
        elif self._calls.num_calls:
            text = text.strip(_SEPARATORS)
        return [ContentDelta(text)] if text else []

    def _begins_call(self) -> bool:
        """Whether the held text begins a call; if it cannot, it is text from here on."""
        stripped = self._held.lstrip(_SEPARATORS if self._calls.num_calls else None)
        if stripped.startswith(PYTHON_TAG):
            stripped = stripped[len(PYTHON_TAG) :].lstrip()
        elif PYTHON_TAG.startswith(stripped):
            return False  # not known yet
        if not stripped:
            return False
        if not stripped.startswith("{"):
            self._is_text = True
            self._held = stripped if self._calls.num_calls else self._held
            return False
        self._held, self._reader = stripped, CallReader()
        return True

    def _read_call(self) -> list[AnswerEvent]:
        reader = self._reader
        assert reader is not None
        self._held = reader.feed(self._held)
        if reader.has_failed:
            self._reader, self._is_text, self._held = None, True, reader.raw + self._held
            return []
        if reader.is_done:
            self._reader = None
        return self._calls.of(reader)
