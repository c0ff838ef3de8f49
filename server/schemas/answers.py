"""What whole answers look like, for the API's documentation.

Owns the shapes that `/openapi.json` shows. Answers themselves are built as plain dictionaries (`chat_answers`,
`text_answers`), and a test reads them with these models. Fields that are there only when asked for are optional.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class PromptTokensDetails(BaseModel):
    """How many prompt tokens the prefix cache served."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What the answer's tokens were, and what became of a prediction."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CompletionUsage(BaseModel):
    """Token counts of all answers; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(BaseModel):
    """A function, and the text of a JSON object, its arguments."""

    name: str
    arguments: str


class ToolCallPart(BaseModel):
    """A call that the model wants to be made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The answer. Content is null beside calls, if there is none."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[dict[str, Any]]
    reasoning_content: str | None = None  # if the model reasons
    reasoning: str | None = None  # the same, under vLLM's name
    tool_calls: list[ToolCallPart] | None = None  # if there are any


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    created: int
    model: str
    usage: CompletionUsage
    system_fingerprint: str
    metrics: dict[str, Any] | None = None  # with `return_metrics`


class ChatChoice(BaseModel):
    """One answer to a conversation."""

    model_config = ConfigDict(extra="forbid")

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None  # with `return_token_ids`


class ChatCompletion(_Answer):
    """A whole answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    service_tier: Literal["default"] | None = None  # if the request names one
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # if asked for
    prompt_token_ids: list[int] | None = None  # with `return_token_ids`


class TextChoice(BaseModel):
    """One continuation of a text."""

    model_config = ConfigDict(extra="forbid")

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # if asked for
    token_ids: list[int] | None = None  # with `return_token_ids`
    prompt_token_ids: list[int] | None = None  # likewise


class TextCompletion(_Answer):
    """A whole continuation of one text or several."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ResponseObject(BaseModel):
    """A response. Fields of the request are echoed beside these."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class DeletedResponse(BaseModel):
    """What is left of a response."""

    id: str
    object: Literal["response"]
    deleted: bool
