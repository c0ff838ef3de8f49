"""The languages that a request may hold its answer to: OpenAI's `response_format`, vLLM's `structured_outputs`.

Owns their shape, and that exactly one is asked for. Refuses to know grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from server.errors import INVALID_COMBINATION, MISSING_PARAMETER
from server.schemas.client_model import MAX_ITEMS, ClientModel

_NO_TAGS = "say what the whole answer must be, with json, regex, choice or grammar"


class JsonSchemaFormat(ClientModel):
    """A JSON schema with its name. The answer is always held to it, `strict` or not."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(ClientModel):
    """What the answer must be."""

    refused_fields: ClassVar[Mapping[str, str]] = {"structures": _NO_TAGS, "triggers": _NO_TAGS}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def require_the_schema(self) -> ResponseFormat:
        """`json_schema` comes with its schema, and nothing else does."""
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError(
                MISSING_PARAMETER, "'{name}' is required with the type 'json_schema'.", {"name": "json_schema"}
            )
        if self.type != "json_schema" and self.json_schema is not None:
            raise PydanticCustomError(
                INVALID_COMBINATION, "'{name}' goes with the type 'json_schema' only.", {"name": "json_schema"}
            )
        return self


class StructuredOutputs(ClientModel):
    """A language for the answer; exactly one of the fields is given."""

    refused_fields: ClassVar[Mapping[str, str]] = {
        "structural_tag": _NO_TAGS,
        "whitespace_pattern": "JSON is written with the whitespace that the model likes",
        "disable_any_whitespace": "JSON is written with the whitespace that the model likes",
        "disable_additional_properties": 'write "additionalProperties": false into the schema',
    }

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Field(min_length=1, max_length=MAX_ITEMS)] = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def require_exactly_one(self) -> StructuredOutputs:
        """Two languages at once have no meaning, and none has no effect."""
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise PydanticCustomError(
                "structured_outputs", "give exactly one of json, regex, choice, grammar and json_object"
            )
        return self
