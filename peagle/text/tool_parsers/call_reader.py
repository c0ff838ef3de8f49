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
    """Reads one call. Each character costs the same, however long the call.

    Attributes:
        name: of the function, once it is known.
        is_done: the object has ended.
        has_failed: it is no call; what was read is in `raw`.
    """

    name: str | None = None
    is_done: bool = False
    has_failed: bool = False
    _raw: list[str] = field(default_factory=list)
    _arguments: list[str] = field(default_factory=list)  # that have not been taken
    _state: str = "start"
    _key: str = ""
    _value: list[str] = field(default_factory=list)
    _span: ValueSpan = field(default_factory=ValueSpan)
    _is_handed_on: bool = False  # the value that is being read is an object of arguments
    _has_arguments: bool = False

    @property
    def raw(self) -> str:
        """Everything read until it was known to be a call."""
        return "".join(self._raw)

    @property
    def has_news(self) -> bool:
        """True if there is something to tell of a call."""
        return self.name is not None and bool(self._arguments or self.is_done)

    def feed(self, text: str) -> str:
        """Read on; returns what follows the object, or the failure."""
        for place, char in enumerate(text):
            if not (self.name is not None and self._has_arguments):
                self._raw.append(char)
            self._take(char)
            if self.is_done or self.has_failed:
                return text[place + 1 :]
        return ""

    def take_arguments(self) -> str:
        """What is new of the arguments; "" while the name is unknown."""
        if self.name is None:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _take(self, char: str) -> None:
        if self._state == "value":
            self._take_value(char)
            return
        if self._state == "key":
            self._value.append(char)
            if self._span.ends_with(char):
                self._key, self._state = _decoded("".join(self._value)), "colon"
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
            self._is_handed_on = self._key in _ARGUMENT_KEYS and char in "{["
            self._take(char)
        elif self._state == "comma" and char == ",":
            self._state = "next_key"
        elif self._state in ("comma", "first_key") and char == "}":
            self._end()
        else:
            self.has_failed = self.name is None or not self._has_arguments
            self.is_done = not self.has_failed  # the call is whole, whatever this is

    def _begin(self, state: str) -> None:
        self._state, self._span = state, ValueSpan()
        self._value.clear()

    def _take_value(self, char: str) -> None:
        if self._span.ends_before(char):
            self._end_value()
            self._take(char)
            return
        if self._is_handed_on:
            self._hand_on(char)
        else:
            self._value.append(char)
        if self._span.ends_with(char):
            self._end_value()

    def _hand_on(self, text: str) -> None:
        self._has_arguments = True
        self._arguments.append(text)

    def _end_value(self) -> None:
        self._state = "comma"
        if self._is_handed_on:
            self._is_handed_on = False
            return
        value = "".join(self._value)
        if self._key in _NAME_KEYS and self.name is None:
            self.name = (_decoded(value) if value.startswith('"') else "") or None
            self.has_failed = self.name is None
        elif self._key in _ARGUMENT_KEYS:
            self._hand_on(_unwrapped(value))

    def _end(self) -> None:
        if self.name is None:
            self.has_failed = True
            return
        if not self._has_arguments:
            self._arguments.append("{}")
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
