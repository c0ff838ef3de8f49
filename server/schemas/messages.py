"""The messages of a conversation, as clients send them.

Owns their shape by role: who needs a content, who may call tools. Refuses to know what a chat template makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.errors import INVALID_COMBINATION, MISSING_PARAMETER, UNSUPPORTED_PARAMETER
from server.schemas.client_model import MAX_ITEMS, MAX_NAME, STRING_OR_LIST, ClientModel

ROLES = ("developer", "system", "user", "assistant", "tool")
_OLD_CALLS = "it is the old form of tool calls; send 'tool_calls'"


class TextPart(ClientModel):
    """One part of a message's content."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None

    @field_validator("type")
    @classmethod
    def refuse_other_parts(cls, value: str) -> str:
        """Only text can be read."""
        if value not in ("text", "refusal"):
            raise PydanticCustomError(
                UNSUPPORTED_PARAMETER,
                "Content parts of type '{type}' are not supported: this model reads parts of type 'text' only.",
                {"type": value[:MAX_NAME]},
            )
        return value

    @model_validator(mode="after")
    def require_its_text(self) -> TextPart:
        """A part of type `text` has a `text`, one of type `refusal` a `refusal`."""
        if getattr(self, self.type) is None:
            raise PydanticCustomError(
                MISSING_PARAMETER, "'{name}' is required in a part of type '{name}'.", {"name": self.type}
            )
        return self

    @property
    def words(self) -> str:
        """What the part says."""
        text = self.text if self.type == "text" else self.refusal
        return text or ""


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("<list>")],
    STRING_OR_LIST,
]


def joined(content: str | list[TextPart] | None) -> str:
    """A content as one string; parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.words for part in content)


class CalledFunction(ClientModel):
    """The function of a tool call in the history. `arguments` is the text of a JSON object."""

    name: str
    arguments: str

    @property
    def value(self) -> Any:
        """The arguments as JSON has them; their text where it is no JSON, as a model may have cut it short."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


class ToolCall(ClientModel):
    """A tool call that the assistant made earlier in the conversation."""

    id: str | None = None
    type: Annotated[str | None, Field(json_schema_extra={"enum": ["function", None]})] = None
    index: int | None = None
    function: CalledFunction

    @field_validator("type")
    @classmethod
    def refuse_other_types(cls, value: str | None) -> str | None:
        """Only functions can be called."""
        if value not in (None, "function"):
            raise PydanticCustomError(
                UNSUPPORTED_PARAMETER,
                "Tool calls of type '{type}' are not supported; only 'function' is.",
                {"type": value[:MAX_NAME]},
            )
        return value


class ChatMessage(ClientModel):
    """One message of the conversation."""

    refused_fields: ClassVar[Mapping[str, str]] = {
        "audio": "this model has no audio",
        "function_call": _OLD_CALLS,
    }

    role: Annotated[str, Field(json_schema_extra={"enum": list(ROLES)})]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = None  # clients send back the messages that they were given

    @field_validator("role")
    @classmethod
    def refuse_other_roles(cls, value: str) -> str:
        """The role `function` went together with `functions`, which are not served."""
        if value not in ROLES:
            raise PydanticCustomError(
                "role", "role '{role}' is not one of {roles}", {"role": value[:MAX_NAME], "roles": ", ".join(ROLES)}
            )
        return value

    @model_validator(mode="after")
    def require_what_the_role_needs(self) -> ChatMessage:
        """Only the assistant may call tools, and only a message with calls or a refusal may lack a content."""
        if self.role != "assistant" and self.tool_calls:
            raise _misplaced("tool_calls", "only a message of the assistant has tool calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError(
                MISSING_PARAMETER,
                "'{name}' is required in a message of role 'tool': it says which call is answered.",
                {"name": "tool_call_id"},
            )
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            if "content" in self.model_fields_set:
                raise _misplaced("content", "it is null; only an assistant's calls or refusal go without a content")
            raise PydanticCustomError(MISSING_PARAMETER, "'{name}' is required.", {"name": "content"})
        return self

    @property
    def text(self) -> str:
        """The content as one string; a refusal is what the assistant said instead."""
        return self.refusal or "" if self.content is None else joined(self.content)


def _misplaced(name: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError(
        INVALID_COMBINATION, "Invalid value for '{name}': {reason}.", {"name": name, "reason": reason}
    )
