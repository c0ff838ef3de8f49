"""The bodies of `POST /v1/chat/completions`.

Owns names and types of what a client may send, and the shape of a whole answer. A field that is not listed is refused
by name, never ignored; an explicit null is the same as leaving a field out. Types are strict ("5" is no number).
Refuses to know ranges of sampling parameters: `SamplingParams` checks those. `streaming` writes the chunks of a stream.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.errors import INVALID_COMBINATION, UNSUPPORTED_PARAMETER

MAX_INT = 2**31 - 1  # of counts; larger ones have no meaning, and thousands of digits cost time to print
MAX_ITEMS = 65_536  # of lists; a longer one does not fit in any context
ROLES = ("developer", "system", "user", "assistant")


class ClientModel(BaseModel):
    """Base of everything a client sends: strict types, and unlisted fields refused by name."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def refuse_unlisted(self) -> ClientModel:
        """Refuse fields that would otherwise be ignored. Null is absence."""
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise PydanticCustomError(
                    UNSUPPORTED_PARAMETER,
                    "'{name}' is not supported by this server; leave it out.",
                    {"name": name[:100]},
                )
        return self


class TextPart(ClientModel):
    """One part of a message's content."""

    type: str
    text: str

    @field_validator("type")
    @classmethod
    def refuse_other_parts(cls, value: str) -> str:
        """Only text can be read."""
        if value != "text":
            raise PydanticCustomError(
                UNSUPPORTED_PARAMETER,
                "Content parts of type '{type}' are not supported by this server; only 'text' is.",
                {"type": value[:100]},
            )
        return value


def _shape(value: Any) -> str | None:
    """Which arm of a string-or-list union a value belongs to. None: neither."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


_STRING_OR_LIST = Discriminator(
    _shape, custom_error_type="string_or_list", custom_error_message="Input should be a string or a list"
)
Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("<list>")],
    _STRING_OR_LIST,
]
Stop = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str], Field(max_length=4, fail_fast=True), Tag("<list>")],
    _STRING_OR_LIST,
]


class ChatMessage(ClientModel):
    """One message of the conversation."""

    role: str
    content: Content

    @field_validator("role")
    @classmethod
    def refuse_other_roles(cls, value: str) -> str:
        """Tool messages come with tool calls, which are not served."""
        if value not in ROLES:
            raise PydanticCustomError(
                "role", "role '{role}' is not one of {roles}", {"role": value[:100], "roles": ", ".join(ROLES)}
            )
        return value

    @property
    def text(self) -> str:
        """The content as one string; parts are joined by line breaks."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class StreamOptions(ClientModel):
    """How to stream."""

    include_usage: bool | None = None


class ChatCompletionRequest(ClientModel):
    """What is asked of `POST /v1/chat/completions`."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_INT)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=MAX_INT)] = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def refuse_stream_options_without_stream(self) -> ChatCompletionRequest:
        """As OpenAI does: the options would have no effect."""
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                INVALID_COMBINATION,
                "'{name}' is only allowed together with 'stream': true.",
                {"name": "stream_options"},
            )
        return self

    @property
    def completion_limit(self) -> int | None:
        """Most tokens of the answer; `max_completion_tokens` wins over its older name."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class PromptTokensDetails(BaseModel):
    """How many prompt tokens the prefix cache served."""

    cached_tokens: int


class CompletionUsage(BaseModel):
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The one choice."""

    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    system_fingerprint: str | None = None
