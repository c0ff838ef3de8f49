"""The tools that a request offers, and the choice among them.

Owns their shape. Refuses to know how a model calls tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.errors import UNSUPPORTED_PARAMETER
from server.schemas.client_model import MAX_NAME, ClientModel

MAX_TOOLS = 128


def refuse_other_arguments(parameters: dict[str, Any] | None) -> None:
    """A schema of arguments that is no object's is an error."""
    kind = "object" if parameters is None else parameters.get("type", "object")
    if kind != "object":
        raise PydanticCustomError(
            "parameters",
            "the schema of a function's arguments must be of type 'object', got {kind}",
            {"kind": str(kind)[:MAX_NAME]},
        )


class FunctionDefinition(ClientModel):
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def require_an_object(self) -> FunctionDefinition:
        """Arguments are an object, whatever is in it."""
        refuse_other_arguments(self.parameters)
        return self


class Tool(ClientModel):
    """One tool."""

    type: Annotated[str, Field(json_schema_extra={"const": "function"})]
    function: FunctionDefinition

    @field_validator("type")
    @classmethod
    def refuse_other_types(cls, value: str) -> str:
        """Only functions can be called."""
        if value != "function":
            raise PydanticCustomError(
                UNSUPPORTED_PARAMETER,
                "Tools of type '{type}' are not supported; only 'function' is.",
                {"type": value[:MAX_NAME]},
            )
        return value


class FunctionName(ClientModel):
    """A function by its name."""

    name: str


class NamedTool(ClientModel):
    """`{"type": "function", "function": {"name": ...}}`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(ClientModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceObject(ClientModel):
    """A choice that names tools: one that must be called, or those that may be."""

    refused_fields: ClassVar[Mapping[str, str]] = {"custom": "only tools of type 'function' are"}

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def require_what_the_type_says(self) -> ToolChoiceObject:
        """`type` names the field that holds the choice."""
        if getattr(self, self.type) is None:
            raise PydanticCustomError("tool_choice", "'{field}' is required with this type", {"field": self.type})
        return self


def _choice_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    return "<object>" if isinstance(value, dict | ClientModel) else None


WORD_OR_OBJECT = Discriminator(
    _choice_shape, custom_error_type="tool_choice", custom_error_message="Input should be a string or an object"
)
ToolChoiceWord = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ToolChoiceWord, Tag("<word>")] | Annotated[ToolChoiceObject, Tag("<object>")], WORD_OR_OBJECT
]
