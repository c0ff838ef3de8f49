"""Llama 3.2 and 4, and others: the answer is a Python list of calls, `[f(a=1, b="x"), g()]`.

Owns this format. Each argument is handed on as JSON once it is whole. An answer that does not begin like such a list is
text. Refuses to evaluate anything but literals.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peagle.text.answer_events import AnswerEvent, ContentDelta
from peagle.text.tool_parsers.call_events import CallEvents
from peagle.text.tool_parsers.tool_format import CallGrammar, ToolFunction

_BEGINNING = re.compile(r"\s*\[\s*([A-Za-z_][\w.]*\s*(\(|$)|$)")
_LONGEST_BEGINNING = 4096  # characters before the first bracket; what is longer is no name
_MAX_LITERAL = 100_000  # characters of one argument
_MAX_NESTING = 50
_NAMES = {"true": True, "false": False, "null": None}


class PythonicFormat:
    """See `ToolFormat`."""

    name = "pythonic"
    marks = ("<|python_start|>", "<|python_end|>")
    begin = None

    def parser(self) -> PythonicParser:
        """Reads one answer."""
        return PythonicParser()

    def define_body(self, grammar: CallGrammar, functions: Sequence[ToolFunction], *, has_several: bool) -> str:
        """Calls with keyword arguments: JSON literals, of which `true`, `false` and `null` are read as such."""
        alternatives = []
        for index, function in enumerate(functions):
            alternatives.append(grammar.rule(f"call_{index}", _call_term(grammar, function, index)))
        call = grammar.rule("one_call", *alternatives)
        more = f" ({json.dumps(', ')} {call})*" if has_several else ""
        return grammar.rule("calls", f"{json.dumps('[')} {call}{more} {json.dumps(']')}")

    def separator(self) -> str | None:
        """There is no mark."""
        return None


def _call_term(grammar: CallGrammar, function: ToolFunction, index: int) -> str:
    """Required arguments in the order of the schema, then any of the others in that order."""
    properties = function.schema.get("properties") or {}
    required = [name for name in properties if name in (function.schema.get("required") or ())]
    optional = [name for name in properties if name not in required]
    definitions = {key: function.schema[key] for key in ("$defs", "definitions") if key in function.schema}

    def argument(name: str) -> str:
        schema = properties[name]
        value = grammar.schema(
            {**schema, **definitions} if isinstance(schema, dict) else {}, of=f"{function.title} ({name})"
        )
        return f"{json.dumps(name + '=')} {value}"

    comma = json.dumps(", ")
    parts = [f" {comma} ".join(argument(name) for name in required)] if required else []
    if required:
        parts += [f"({comma} {argument(name)})?" for name in optional]
    elif optional:
        alternatives = []
        for place, name in enumerate(optional):
            rest = [f"({comma} {argument(other)})?" for other in optional[place + 1 :]]
            alternatives.append(" ".join([argument(name), *rest]))
        parts.append(f"({grammar.rule(f'arguments_{index}', *alternatives)})?")
    return " ".join([json.dumps(function.name + "("), *parts, json.dumps(")")])


@dataclass(slots=True)
class _ArgumentEnd:
    """Finds the comma or bracket that ends an argument. Goes on where it stopped, so that length costs nothing."""

    place: int = 0  # characters that have been looked at
    depth: int = 0
    quote: str = ""
    is_escaped: bool = False

    def find(self, text: str) -> int | None:
        """Its place in `text`, which is longer than at the last call; None if it is still to come."""
        while self.place < len(text):
            if self._ends_with(text[self.place]):
                return self.place
            self.place += 1
        return None

    def _ends_with(self, char: str) -> bool:
        if self.quote:
            if self.is_escaped:
                self.is_escaped = False
            elif char == "\\":
                self.is_escaped = True
            elif char == self.quote:
                self.quote = ""
        elif char in "\"'":
            self.quote = char
        elif char in "([{":
            self.depth += 1
        elif char in ")]}" and self.depth:
            self.depth -= 1
        else:
            return char in ",)" and self.depth == 0
        return False


class PythonicParser:
    """See `AnswerParser`."""

    def __init__(self) -> None:
        self._calls = CallEvents()
        self._held = ""
        self._state = "start"
        self._num_arguments = 0
        self._end = _ArgumentEnd()

    def feed(self, text_delta: str) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        if self._state == "text":
            return [ContentDelta(text_delta)] if text_delta else []
        self._held += text_delta
        steps = {"start": self._read_start, "name": self._read_name, "argument": self._read_argument}
        events: list[AnswerEvent] = []
        while self._state in steps and self._held:
            before = (len(self._held), self._state)
            events += steps[self._state]()
            if (len(self._held), self._state) == before:
                break
        if self._state == "text" and self._held:
            events.append(ContentDelta(self._held))
            self._held = ""
        return events

    def finish(self) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        text, self._held = self._held, ""
        return [ContentDelta(text)] if text and not self._calls.num_calls else []

    def _read_start(self) -> list[AnswerEvent]:
        for mark in PythonicFormat.marks:
            self._held = self._held.replace(mark, "")
        stripped = self._held.lstrip()
        if any(mark.startswith(stripped) for mark in PythonicFormat.marks):
            return []  # also nothing but white space so far
        if len(self._held.partition("(")[0]) > _LONGEST_BEGINNING or not _BEGINNING.match(self._held):
            self._state = "text"
        elif "(" in self._held:
            self._state, self._held = "name", stripped[1:]
        return []

    def _read_name(self) -> list[AnswerEvent]:
        """The name of the next call, or the end of the list."""
        stripped = self._held.lstrip(" \t\r\n,")
        if stripped.startswith("]"):
            self._state, self._held = "after", ""
            return []
        name, bracket, rest = stripped.partition("(")
        if not bracket:
            return []
        self._state, self._held, self._num_arguments = "argument", rest, 0
        return self._calls.begin(name.strip())

    def _read_argument(self) -> list[AnswerEvent]:
        """One argument, if it is whole."""
        place = self._end.find(self._held)
        if place is None:
            return []
        self._end = _ArgumentEnd()
        text, char, self._held = self._held[:place], self._held[place], self._held[place + 1 :]
        events: list[AnswerEvent] = []
        name, _, literal = text.partition("=")
        if name.strip():
            piece = f"{json.dumps(name.strip())}: {_to_json(literal)}"
            events += self._calls.arguments(("{" if self._num_arguments == 0 else ", ") + piece)
            self._num_arguments += 1
        if char == ")":
            events += self._calls.arguments("{}" if self._num_arguments == 0 else "}")
            self._calls.end()
            self._state = "name"
        return events


def _to_json(literal: str) -> str:
    """A Python literal as JSON; what is none becomes a string of its text."""
    text = literal.strip()
    try:
        if len(text) > _MAX_LITERAL or sum(text.count(bracket) for bracket in "([{") > _MAX_NESTING:
            return json.dumps(text)
        return json.dumps(_value(ast.parse(text, mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)
