"""Turns the text of a flag or variable, or a value of YAML, into the type that a configuration field declares.

Owns the conversions and the words for what is wanted. Refuses to know ranges: those are the groups' own checks.
Supported annotations: str, int, float, bool, Literal, tuple[int, ...], tuple[str, ...], each also with `| None`.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from peagle.config import parse_bytes
from peagle.errors import ConfigError
from peagle.spec_config import SpecConfig
from server.config_options import ConfigKey

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def parse_text(key: ConfigKey, text: str) -> Any:
    """Read a flag's or a variable's text.

    Raises:
        ConfigError: not of the declared type; the message says what is wanted and leaves out where it came from.
    """
    kind = without_none(key.annotation)
    if kind is SpecConfig:
        return SpecConfig.from_mapping(_json_object(text))
    if kind is int and key.name.endswith("_bytes"):
        return parse_bytes(text)
    if kind is bool:
        return _bool(text)
    if get_origin(kind) is tuple:
        element = get_args(kind)[0]
        return tuple(_scalar(element, part.strip(), kind) for part in text.split(","))
    return _scalar(kind, text, kind)


def parse_yaml(key: ConfigKey, value: Any) -> Any:
    """Read a value that YAML has already typed. Text is read as a flag's would be where the field is a list or a size.

    Raises:
        ConfigError: not of the declared type.
    """
    kind = without_none(key.annotation)
    if value is None and kind is not key.annotation:
        return None
    if kind is SpecConfig:
        return _spec_from_yaml(value)
    if get_origin(kind) is tuple:
        return _tuple_from_yaml(key, kind, value)
    if kind is str and type(value) is int:
        return str(value)
    if isinstance(value, str) and (kind in (str, bool) or get_origin(kind) is Literal or key.name.endswith("_bytes")):
        return parse_text(key, value)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ConfigError(_wanted(kind))
    return float(value) if kind is float else value


def _spec_from_yaml(value: Any) -> SpecConfig:
    if isinstance(value, str):
        return SpecConfig.from_mapping(_json_object(value))
    if not isinstance(value, Mapping):
        raise ConfigError("wanted a mapping, or JSON text")
    return SpecConfig.from_mapping({str(name): inner for name, inner in value.items()})


def _tuple_from_yaml(key: ConfigKey, kind: Any, value: Any) -> tuple[Any, ...]:
    element = get_args(kind)[0]
    if isinstance(value, str):
        return tuple(parse_text(key, value))
    values = value if isinstance(value, list) else [value]
    if any(type(item) is not element for item in values):
        raise ConfigError(_wanted(kind))
    return tuple(values)


def _scalar(kind: Any, text: str, whole: Any) -> Any:
    """One value of type `kind`; `whole` is what the error asks for (a list, when `text` is one of its elements)."""
    if kind is str:
        return text
    if kind is int and re.fullmatch(r"[+-]?[0-9]+", text.strip()):
        return int(text)
    if kind is float and _is_finite_number(text):
        return float(text)
    if get_origin(kind) is Literal and text in get_args(kind):
        return text
    raise ConfigError(_wanted(whole))


def _is_finite_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError(_wanted(bool))
    return word in _TRUE


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(f"wanted a JSON object; it breaks at character {error.pos + 1}: {error.msg}") from error
    if not isinstance(value, dict):
        raise ConfigError("wanted a JSON object")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"key {name!r} is given twice")
    return dict(pairs)


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "wanted one of " + ", ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "wanted whole numbers, separated by commas" if get_args(kind)[0] is int else "wanted names"
    words = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false"}
    return "wanted " + words[kind]


def without_none(annotation: Any) -> Any:
    """`int | None` is `int`; anything else is itself."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not types.NoneType]
    assert len(kinds) == 1, f"a configuration field may be one type or None, not {annotation}"
    return kinds[0]
