"""gpt-oss: an answer is a series of messages, each with a channel, for the user or for a tool.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{...}<|call|>`, and `final` for the user. Owns this format: it tells reasoning, calls and text apart by
itself. Refuses to know who asked for a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from peagle.text.answer_events import AnswerEvent, ContentDelta, ReasoningDelta
from peagle.text.held_text import find_marker
from peagle.text.tool_parsers.call_events import CallEvents
from peagle.text.tool_parsers.tool_format import CallGrammar, ToolFunction

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_LONGEST_HEADER = 1024  # characters; what is longer is no header
_ENDS = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyFormat:
    """See `ToolFormat`."""

    name = "harmony"
    marks = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    begin = None

    def parser(self) -> HarmonyParser:
        """Reads one answer."""
        return HarmonyParser()

    def define_body(self, grammar: CallGrammar, functions: Sequence[ToolFunction], *, has_several: bool) -> str:
        """A message of analysis, or none, and a call; the model ends its answer with each call."""
        calls = []
        for index, function in enumerate(functions):
            head = json.dumps(f"commentary to=functions.{function.name} ")
            calls.append(
                grammar.rule(
                    f"call_{index}",
                    f"{grammar.mark(CHANNEL)} {head} {grammar.mark(CONSTRAIN)} {json.dumps('json')} "
                    f"{grammar.mark(MESSAGE)} {grammar.schema(function.schema, of=function.title)}",
                )
            )
        call = grammar.rule("call", *calls)
        analysis = " ".join(
            [
                grammar.mark(CHANNEL),
                json.dumps("analysis"),
                grammar.mark(MESSAGE),
                grammar.until("analysis_text", END),
                grammar.mark(START),
                json.dumps("assistant"),
            ]
        )
        return grammar.rule("answer", call, f"{analysis} {call}")

    def separator(self) -> str | None:
        """One call an answer."""
        return None


class HarmonyParser:
    """See `AnswerParser`. The prompt ends with the beginning of the first message, so its header comes first."""

    def __init__(self) -> None:
        self._calls = CallEvents()
        self._held = ""
        self._kind = ""  # of the message that is being read; "" in its header
        self._has_begun = False  # the answer follows the format

    def feed(self, text_delta: str) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        self._held += text_delta
        events: list[AnswerEvent] = []
        while self._held:
            before = (len(self._held), self._kind)
            events += self._read_body() if self._kind else self._read_header()
            if (len(self._held), self._kind) == before:
                break
        return events

    def finish(self) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        held, self._held = self._held, ""
        if self._kind:
            return self._say(held)
        # A header that was cut short says nothing; an answer that never had one is text.
        return [] if self._has_begun or CHANNEL in held or not held else [ContentDelta(held)]

    def _read_header(self) -> list[AnswerEvent]:
        stripped = self._held.lstrip()
        if not self._has_begun and stripped and not any(_begins(stripped, mark) for mark in (*self._heads(), " to=")):
            self._kind = "text"
            return []
        found = find_marker(self._held, (MESSAGE,))
        if len(found.before) > _LONGEST_HEADER:
            self._kind = "text"
            return []
        if found.marker is None:
            return []
        self._has_begun = True
        self._held = found.rest
        recipient = _RECIPIENT.search(found.before)
        if recipient is not None:
            self._kind = "call"
            return self._calls.begin(recipient[1])
        channel = found.before.partition(CHANNEL)[2].split("<|")[0].split()
        self._kind = "reasoning" if channel[:1] == ["analysis"] else "text"
        return []

    def _read_body(self) -> list[AnswerEvent]:
        found = find_marker(self._held, _ENDS)
        events = self._say(found.before)
        self._held = found.rest
        if found.marker is not None:
            self._kind = ""
            self._calls.end()
        return events

    def _say(self, text: str) -> list[AnswerEvent]:
        if not text:
            return []
        if self._kind == "call":
            return self._calls.arguments(text)
        return [ReasoningDelta(text) if self._kind == "reasoning" else ContentDelta(text)]

    def _heads(self) -> tuple[str, ...]:
        return (CHANNEL, START, "to=")


def _begins(text: str, mark: str) -> bool:
    return text.startswith(mark) or mark.startswith(text)
