"""What a client may ask of `POST /v1/responses`.

Owns the fields and what goes together. A response is answered as a chat, so everything that both have is checked where
chats are; refuses to know how one becomes the other (`response_input`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.errors import INVALID_COMBINATION, MISSING_PARAMETER, UNSUPPORTED_PARAMETER
from server.schemas.chat import ReasoningEffort
from server.schemas.client_model import MAX_INT, MAX_ITEMS, MAX_NAME, STRING_OR_LIST, ClientModel, Stop, param
from server.schemas.formats import JsonSchemaFormat
from server.schemas.sampling_fields import REFUSED_EVERYWHERE, Metadata, ServiceTier, StreamOptions
from server.schemas.tools import MAX_TOOLS, WORD_OR_OBJECT, ToolChoiceWord, refuse_other_arguments

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
PART_TYPES = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"


class ItemPart(ClientModel):
    """One part of an item's content."""

    type: Annotated[str, Field(json_schema_extra={"enum": list(PART_TYPES)})]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # clients send back what they were given
    logprobs: list[Any] | None = None

    @field_validator("type")
    @classmethod
    def refuse_other_parts(cls, value: str) -> str:
        """Only text can be read."""
        if value not in PART_TYPES:
            raise PydanticCustomError(
                UNSUPPORTED_PARAMETER,
                "Content parts of type '{type}' are not supported: this model reads text only.",
                {"type": value[:MAX_NAME]},
            )
        return value

    @property
    def words(self) -> str:
        """What the part says."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


Parts = Annotated[list[ItemPart], Field(max_length=MAX_ITEMS, fail_fast=True)]
ItemContent = Annotated[Annotated[str, Tag("<text>")] | Annotated[Parts, Tag("<list>")], STRING_OR_LIST]


def words_of(content: str | list[ItemPart] | None) -> str:
    """A content as one string; parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.words for part in content)


class InputItem(ClientModel):
    """A message, a function call of the assistant's, what came of one, or reasoning."""

    type: Annotated[str | None, Field(json_schema_extra={"enum": [*ITEM_TYPES, None]})] = None
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    phase: str | None = None
    content: ItemContent | None = None
    summary: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: ItemContent | None = None

    @model_validator(mode="after")
    def require_what_the_type_needs(self) -> InputItem:
        """Each type has fields of its own."""
        if self.kind not in ITEM_TYPES:
            raise PydanticCustomError(
                UNSUPPORTED_PARAMETER,
                "Items of type '{type}' are not supported: they are {types}.",
                {"name": "type", "type": self.kind[:MAX_NAME], "types": ", ".join(ITEM_TYPES)},
            )
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        for name in needed[self.kind]:
            if getattr(self, name) is None:
                raise PydanticCustomError(
                    MISSING_PARAMETER, "'{name}' is required in an item of type '{type}'.",
                    {"name": name, "type": self.kind},
                )  # fmt: skip
        return self

    @property
    def kind(self) -> str:
        """Its type; what has none is a message."""
        return "message" if self.type is None else self.type


class FunctionTool(ClientModel):
    """A function that the model may call, in the flat shape of this API."""

    type: Annotated[str, Field(json_schema_extra={"const": "function"})]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def refuse_other_types(self) -> FunctionTool:
        """Nothing is run here: only functions of the client's can be called."""
        if self.type != "function":
            raise PydanticCustomError(
                UNSUPPORTED_PARAMETER,
                "Tools of type '{type}' are not supported; only 'function' is.",
                {"name": "type", "type": self.type[:MAX_NAME]},
            )
        if self.name is None:
            raise PydanticCustomError(MISSING_PARAMETER, "'{name}' is required.", {"name": "name"})
        refuse_other_arguments(self.parameters)
        return self


class NamedFunction(ClientModel):
    """`{"type": "function", "name": ...}`."""

    type: Literal["function"]
    name: str


class ToolChoiceItem(ClientModel):
    """A choice that names functions: one that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def require_what_the_type_says(self) -> ToolChoiceItem:
        """A function has a name, allowed tools have a list."""
        name = "name" if self.type == "function" else "tools"
        if getattr(self, name) is None:
            raise PydanticCustomError(MISSING_PARAMETER, "'{name}' is required with this type.", {"name": name})
        return self


class TextFormat(ClientModel):
    """What the text must be. A schema lies flat in it."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def require_the_schema(self) -> TextFormat:
        """`json_schema` comes with its name and its schema."""
        if self.type == "json_schema":
            for name, value in (("name", self.name), ("schema", self.schema_)):
                if value is None:
                    raise PydanticCustomError(
                        MISSING_PARAMETER, "'{name}' is required with the type 'json_schema'.", {"name": name}
                    )
            JsonSchemaFormat.model_validate({"name": self.name})
        return self


class TextOptions(ClientModel):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(ClientModel):
    """How much to think."""

    refused_fields: ClassVar[Mapping[str, str]] = {
        "summary": "reasoning is sent as it is, in 'content'",
        "generate_summary": "reasoning is sent as it is, in 'content'",
    }

    effort: ReasoningEffort | None = None


class ResponsesRequest(ClientModel):
    """What is asked of `POST /v1/responses`."""

    refused_fields: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        "conversation": "send 'previous_response_id', or the items themselves",
        "prompt": "there are no stored prompts; send 'input'",
        "n": "a response is one answer",
        "messages": "this path takes 'input'",
        "max_tokens": "this path takes 'max_output_tokens'",
        "response_format": "this path takes 'text.format'",
    }

    model: str = Field(description="One of the served names.", json_schema_extra={"x-others": "OVSL"})
    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("<list>")],
        STRING_OR_LIST,
    ] = Field(
        description="A message of the user's, or items: messages, function calls, their outputs, reasoning.",
        json_schema_extra={"x-others": "OVSL"},
    )
    instructions: str | None = param(
        "A system message in front of the conversation; not carried over by `previous_response_id`.",
        default="none", others="OVSL",
    )  # fmt: skip
    previous_response_id: str | None = param(
        "Go on from a stored response: its conversation comes before `input`.", default="none", others="OVS"
    )
    store: bool | None = param(
        "Keep the response in this process's memory, for `previous_response_id` and `GET`; the oldest make room "
        "(--max-stored-response-bytes).", default="true", others="OVS",
    )  # fmt: skip
    background: bool | None = param(
        "Answer at once with a response that is in progress; `GET` tells how it is, `POST .../cancel` ends it.",
        range="with store, without stream", default="false", others="OVS",
    )  # fmt: skip
    stream: bool | None = param("Send typed server-sent events.", default="false", others="OVSL")
    stream_options: StreamOptions | None = param(
        "`include_obfuscation` changes nothing.", range="with stream only", default="none", others="O"
    )
    max_output_tokens: int | None = param(
        "Most tokens of the answer, reasoning included.", default="what the context holds", others="OVSL",
        ge=1, le=MAX_INT,
    )  # fmt: skip
    temperature: float | None = param(
        "Logits are divided by it.", range="0 to 2", default="1", others="OVSL", bounds={"minimum": 0, "maximum": 2}
    )
    top_p: float | None = param(
        "Keeps the likeliest tokens that together reach this probability.",
        range="above 0, to 1", default="1", others="OVSL", bounds={"exclusiveMinimum": 0, "maximum": 1},
    )  # fmt: skip
    top_k: int | None = param("As in chats.", range="-1 or more", default="0", others="VSL")
    min_p: float | None = param("As in chats.", range="0 to 1", default="0", others="VSL")
    seed: int | None = param("As in chats.", range="64 bits, signed", default="drawn", others="VSL")
    presence_penalty: float | None = param("As in chats.", range="-2 to 2", default="0", others="VSL")
    frequency_penalty: float | None = param("As in chats.", range="-2 to 2", default="0", others="VSL")
    repetition_penalty: float | None = param("As in chats.", range="above 0, to 10", default="1", others="VSL")
    stop: Stop | None = param("As in chats.", range="at most 4", default="none", others="SL")
    ignore_eos: bool | None = param("As in chats.", default="false", others="V")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = param(
        "Report the log probability of each token of the text, and those of so many likeliest ones.",
        range="0 to 20", default="none", others="OV",
    )  # fmt: skip
    include: list[str] | None = param(
        "More to be reported: `message.output_text.logprobs`.", default="none", others="OV"
    )
    text: TextOptions | None = param(
        "`format` holds the text to JSON or a JSON schema; `verbosity` is given to the chat template.",
        default="text", others="OVSL",
    )  # fmt: skip
    reasoning: ReasoningOptions | None = param(
        "`effort` is given to the chat template.", default="the template's", others="OVSL"
    )
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = param(
        "Functions that the model may call.", default="none", others="OVSL"
    )
    tool_choice: (
        Annotated[
            Annotated[ToolChoiceWord, Tag("<word>")] | Annotated[ToolChoiceItem, Tag("<object>")], WORD_OR_OBJECT
        ]
        | None
    ) = param(
        "Whether and what to call: none, auto, required, a named function, or some allowed ones.",
        range="with tools only", default="auto with tools", others="OVSL",
    )  # fmt: skip
    parallel_tool_calls: bool | None = param("Whether there may be several calls.", default="true", others="OVS")
    max_tool_calls: int | None = param(
        "Accepted, without effect: it counts calls of built-in tools, and there are none.", others="OV", ge=1
    )
    truncation: Literal["auto", "disabled"] | None = param(
        "`auto` keeps the end of a conversation that is too long.", default="disabled: it is refused", others="OV"
    )
    chat_template_kwargs: dict[str, Any] | None = param("As in chats.", default="none", others="VS")
    priority: int | None = param("As in chats.", default="0", others="VS", ge=-MAX_INT, le=MAX_INT)
    cache_salt: str | None = param("As in chats.", default="none", others="V", pattern=r"^[!-.0-\[\]-~]{1,128}$")
    service_tier: ServiceTier | None = param("Accepted; there is one tier, so the answer says default.", others="O")
    metadata: Metadata | None = param("Echoed.", others="OVS")
    user: str | None = param("Echoed.", others="OVS")
    safety_identifier: str | None = param("Echoed.", others="O")
    prompt_cache_key: str | None = param("Echoed: prefixes are found by their tokens.", others="O")
    prompt_cache_retention: str | None = param("Accepted, without effect.", others="O")

    @model_validator(mode="after")
    def refuse_what_does_not_go_together(self) -> ResponsesRequest:
        """Options without what they are options of, and what is not reported."""
        if self.stream_options is not None and not self.stream:
            raise _combination("stream_options", "it is only allowed together with 'stream': true")
        if self.background and self.stream:
            raise _combination("background", "a response in the background has no stream; ask for it with GET")
        if self.background and self.store is False:
            raise _combination("background", "a response in the background has to be stored")
        if self.tool_choice is not None and self.tool_choice != "none" and not self.tools:
            raise _combination("tool_choice", "it is only allowed together with 'tools'")
        for name in self.include or ():
            if name != LOGPROBS:
                raise PydanticCustomError(
                    UNSUPPORTED_PARAMETER,
                    "'{name}' can only hold '{known}', not '{value}'.",
                    {"name": "include", "known": LOGPROBS, "value": name[:MAX_NAME]},
                )
        return self


def _combination(name: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError(
        INVALID_COMBINATION, "Invalid value for '{name}': {reason}.", {"name": name, "reason": reason}
    )
