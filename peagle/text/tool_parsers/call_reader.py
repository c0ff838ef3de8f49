"""One tool call as a JSON object, read as it is written.

`{"name": "f", "arguments": {...}}`, in either order; `parameters` is another word for arguments, and other keys are
passed over. The arguments are handed on as the model wrote them, piece by piece, as soon as the name is known. Owns
this reading. Refuses to know what is around the object, and whether the arguments suit the function.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

_NAME_KEYS = ("name",)
_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


@dataclass(slots=True)
class ValueSpan:
    """Finds the end of a JSON value. Reads brackets and strings, and believes the rest."""

    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False
    has_begun: bool = False
    is_bare: bool = False  # a number, true, false or null: it ends where something else begins

    def ends_before(self, char: str) -> bool:
        """True if the value ended in front of `char`."""
        return self.is_bare and char in _SPACE + ",]}"

    def ends_with(self, char: str) -> bool:
        """Take `char`; true if the value ends with it."""
        if self.in_string:
            if self.is_escaped:
                self.is_escaped = False
            elif char == "\\":
                self.is_escaped = True
            elif char == '"':
                self.in_string = False
                return self.depth == 0
            return False
        if char == '"':
            self.in_string = True
        elif char in "[{":
            self.depth += 1
        elif char in "]}":
            self.depth -= 1
            return self.depth <= 0
        elif not self.has_begun:
            self.is_bare = True
        self.has_begun = True
        return False


@dataclass(slots=True)
class CallReader:
    """Reads one call.

    Attributes:
        name: of the function, once it is known.
        arguments: of its JSON, what has not been taken yet; "" while the name is unknown.
        is_done: the object has ended.
        has_failed: it is no call; what was read is in `raw`.
        raw: everything read so far.
    """

    name: str | None = None
    arguments: str = ""
    is_done: bool = False
    has_failed: bool = False
    raw: str = ""
    _state: str = "start"
    _key: str = ""
    _value: str = ""
    _span: ValueSpan = field(default_factory=ValueSpan)
    _early: str = ""  # arguments that came before the name
    _has_arguments: bool = False

    def feed(self, text: str) -> str:
        """Read on; returns what follows the object, or the failure."""
        for place, char in enumerate(text):
            self.raw += char
            self._take(char)
            if self.is_done or self.has_failed:
                return text[place + 1 :]
        return ""

    def take_arguments(self) -> str:
        """What is new of the arguments."""
        taken, self.arguments = self.arguments, ""
        return taken

    def _take(self, char: str) -> None:
        if self._state == "value":
            self._take_value(char)
            return
        if self._state == "key":
            self._value += char
            if self._span.ends_with(char):
                self._key, self._state = _decoded(self._value), "colon"
            return
        if char in _SPACE:
            return
        if self._state == "start" and char == "{":
            self._state = "first_key"
        elif self._state in ("first_key", "next_key") and char == '"':
            self._begin("key")
            self._take(char)
        elif self._state == "colon" and char == ":":
            self._state = "value_start"
        elif self._state == "value_start":
            self._begin("value")
            self._take(char)
        elif self._state == "comma" and char == ",":
            self._state = "next_key"
        elif self._state in ("comma", "first_key") and char == "}":
            self._end()
        else:
            self.has_failed = self.name is None or not self._has_arguments
            self.is_done = not self.has_failed  # the call is whole, whatever this is

    def _begin(self, state: str) -> None:
        self._state, self._value, self._span = state, "", ValueSpan()

    def _take_value(self, char: str) -> None:
        if self._span.ends_before(char):
            self._end_value()
            self._take(char)
            return
        self._value += char
        ends = self._span.ends_with(char)
        if self._key in _ARGUMENT_KEYS and self._value[0] in "{[":
            self._hand_on(char)
        if ends:
            self._end_value()

    def _hand_on(self, text: str) -> None:
        self._has_arguments = True
        if self.name is None:
            self._early += text
        else:
            self.arguments += text

    def _end_value(self) -> None:
        self._state = "comma"
        if self._key in _NAME_KEYS and self.name is None:
            name = _decoded(self._value) if self._value.startswith('"') else ""
            if not name:
                self.has_failed = True
                return
            self.name = name
            self.arguments, self._early = self._early, ""
        elif self._key in _ARGUMENT_KEYS and self._value[0] not in "{[":
            self._hand_on(_unwrapped(self._value))

    def _end(self) -> None:
        if self.name is None:
            self.has_failed = True
            return
        if not self._has_arguments:
            self.arguments = "{}"
        self.is_done = True


def _decoded(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text[1:-1]


def _unwrapped(text: str) -> str:
    """Arguments that are no object: null are none, and some models write the object as a string."""
    if text == "null":
        return "{}"
    return (_decoded(text) or "{}") if text.startswith('"') else text
