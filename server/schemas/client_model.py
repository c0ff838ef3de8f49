"""The base of everything that a client sends, and the words that a field is described in.

Owns strictness ("5" is no number), what happens to fields that are not listed, and the unions that JSON clients like.
Refuses to know any single field. An explicit null is the same as leaving a field out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.errors import UNSUPPORTED_PARAMETER

MAX_INT = 2**31 - 1  # of counts; larger ones have no meaning, and thousands of digits cost time to print
MAX_ITEMS = 65_536  # of lists; a longer one does not fit in any context
MAX_NAME = 100  # characters of a client's own name for something, where it is repeated to it


def param(
    text: str,
    *,
    range: str = "",
    default: str = "",
    others: str = "",
    bounds: Mapping[str, Any] | None = None,
    **constraints: Any,
) -> Any:
    """A field that may be left out.

    Args:
        text: what it does; a sentence of docs/api.md.
        range: which values it takes, where that is not to be read off the type and the constraints.
        default: what leaving it out means.
        others: which servers have it too, by letter: O(penAI), V(LLM), S(GLang), L(lama.cpp).
        bounds: keywords of JSON Schema that `/openapi.json` shows, for ranges that are checked further in.
        constraints: further arguments of pydantic's `Field`.
    """
    extra: dict[str, Any] = {"x-range": range, "x-default": default, "x-others": others, **(bounds or {})}
    return Field(default=None, description=text, json_schema_extra=extra, **constraints)


def unsupported(name: str, reason: str) -> PydanticCustomError:
    """The error for a field that is known and not served. `reason` says what to do instead."""
    return PydanticCustomError(
        UNSUPPORTED_PARAMETER, "'{name}' is not supported: {reason}.", {"name": name[:MAX_NAME], "reason": reason}
    )


class ClientModel(BaseModel):
    """Base of everything a client sends: strict types.

    Fields that are not listed are kept aside (`ignored_fields` finds them), but those of `refused_fields` are errors:
    to leave them out silently would change the answer that is asked for. Its values say what to do instead.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    refused_fields: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="after")
    def refuse_by_name(self) -> ClientModel:
        """Refuse what is known and not served. Null is absence."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in self.refused_fields:
                raise unsupported(name, self.refused_fields[name])
        return self


def ignored_fields(body: ClientModel, path: str = "") -> Iterator[str]:
    """Paths of the fields that nothing here reads, such as `temprature` or `messages[0].mood`."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield path + name[:MAX_NAME]
    for name in type(body).model_fields:
        yield from _ignored_within(getattr(body, name), path + name.rstrip("_"))


def _ignored_within(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, ClientModel):
        yield from ignored_fields(value, f"{path}.")
    elif isinstance(value, list) and value and isinstance(value[0], ClientModel):
        for index, item in enumerate(value):
            yield from ignored_fields(item, f"{path}[{index}].")


def shape_of(value: Any) -> str | None:
    """Which arm of a string-or-list union a value belongs to. None: neither."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


STRING_OR_LIST = Discriminator(
    shape_of, custom_error_type="string_or_list", custom_error_message="Input should be a string or a list"
)
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Stop = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str], Field(max_length=4, fail_fast=True), Tag("<list>")],
    STRING_OR_LIST,
]
