"""What a client may ask of `POST /v1/chat/completions`.

Owns the fields that only chats have, and what goes together. Refuses to know how they are served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from server.errors import INVALID_COMBINATION
from server.schemas.client_model import MAX_INT, MAX_ITEMS, ClientModel, param
from server.schemas.messages import ChatMessage, Content
from server.schemas.sampling_fields import REFUSED_EVERYWHERE, Metadata, SamplingFields, ServiceTier
from server.schemas.tools import MAX_TOOLS, Tool, ToolChoice, ToolChoiceObject

MAX_TEMPLATE = 2**16  # characters
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Prediction(ClientModel):
    """What the client expects the answer to be. Where it is right, tokens come faster; the answer stays the same."""

    type: Literal["content"]
    content: Content


class ChatCompletionRequest(SamplingFields):
    """What is asked of `POST /v1/chat/completions`."""

    refused_fields: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        "functions": "it is the old form of 'tools'",
        "function_call": "it is the old form of 'tool_choice'",
        "audio": "this model has no audio",
        "web_search_options": "nothing here searches the web",
        "moderation": "nothing here moderates",
        "mm_processor_kwargs": "this model reads text only",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)] = Field(
        description="The conversation. Contents are text, or parts of type `text`, which are joined by line breaks.",
        json_schema_extra={"x-others": "OVSL"},
    )
    max_tokens: int | None = param(
        "Older name of `max_completion_tokens`.", default="what the context holds", others="OVSL", ge=1, le=MAX_INT
    )
    max_completion_tokens: int | None = param(
        "Most tokens of an answer; wins over `max_tokens`.",
        default="what the context holds", others="OVSL", ge=1, le=MAX_INT,
    )  # fmt: skip
    logprobs: bool | None = param("Report the log probability of each token.", default="false", others="OVSL")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = param(
        "And those of so many likeliest tokens.", range="0 to 20, with logprobs only", default="0", others="OVSL"
    )
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = param(
        "Functions that the model may call. With `strict` its arguments are held to `parameters` under `auto`, too.",
        default="none",
        others="OVSL",
    )
    tool_choice: ToolChoice | None = param(
        "Whether and what to call: none, auto, required, a named function, or some allowed ones.",
        range="with tools only", default="auto with tools", others="OVSL",
    )  # fmt: skip
    parallel_tool_calls: bool | None = param(
        "Whether an answer may have several tool calls.", default="true", others="OVS"
    )
    reasoning_effort: ReasoningEffort | None = param(
        "Given to the chat template; none also sets its `enable_thinking` to false.", default="none", others="OVSL"
    )
    verbosity: Literal["low", "medium", "high"] | None = param("Given to the chat template.", others="O")
    chat_template_kwargs: dict[str, Any] | None = param(
        "Further variables of the chat template.", default="none", others="VSL"
    )
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE)] | None = param(
        "Jinja in place of the model's own template.", range="with --trust-request-chat-template only",
        default="the model's own", others="V",
    )  # fmt: skip
    documents: list[dict[str, Any]] | None = param("Given to the chat template.", default="none", others="V")
    add_generation_prompt: bool | None = param(
        "End the prompt with the beginning of an assistant's message.",
        range="not with continue_final_message", default="true, unless continuing", others="V",
    )  # fmt: skip
    continue_final_message: bool | None = param(
        "Go on with the last message instead of answering it.", default="false", others="VSL"
    )
    echo: bool | None = param(
        "Begin the answer with the message that it continues.",
        range="with continue_final_message only", default="false", others="V",
    )  # fmt: skip
    prediction: Prediction | None = param(
        "What the answer will probably be, as drafts: a right prediction makes it faster and never changes it. The "
        "usage counts its accepted and rejected tokens.", default="none", others="O",
    )  # fmt: skip
    modalities: Annotated[list[Literal["text"]], Field(min_length=1)] | None = param(
        "What the answer may be.", range='["text"]', default='["text"]', others="O"
    )
    service_tier: ServiceTier | None = param("Accepted; there is one tier, so the answer says default.", others="O")
    metadata: Metadata | None = param("Accepted, without effect: nothing is stored.", others="O")
    store: bool | None = param("Accepted, without effect: nothing is stored.", others="O")
    safety_identifier: str | None = param("Accepted, without effect.", others="O")
    prompt_cache_key: str | None = param("Accepted, without effect: prefixes are found by their tokens.", others="O")
    prompt_cache_retention: str | None = param("Accepted, without effect.", others="O")

    @model_validator(mode="after")
    def refuse_what_does_not_go_together(self) -> ChatCompletionRequest:
        """Options without what they are options of, and options that contradict each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise _without("top_logprobs", "'logprobs': true")
        if self.tool_choice is not None and self.tool_choice != "none" and not self.tools:
            raise _without("tool_choice", "'tools'")
        if self.echo and not self.continue_final_message:
            raise _without("echo", "'continue_final_message': true")
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                INVALID_COMBINATION,
                "'{name}' goes on with the last message, so 'add_generation_prompt' must not begin another one.",
                {"name": "continue_final_message"},
            )
        self._refuse_unknown_tools()
        return self

    def _refuse_unknown_tools(self) -> None:
        if not isinstance(self.tool_choice, ToolChoiceObject):
            return
        known = {tool.function.name for tool in self.tools or ()}
        for name in self.chosen_tool_names:
            if name not in known:
                raise PydanticCustomError(
                    INVALID_COMBINATION,
                    "'{name}' names the function '{function}', which is not among the 'tools'.",
                    {"name": "tool_choice", "function": name[:100]},
                )

    @property
    def chosen_tool_names(self) -> list[str]:
        """The functions that `tool_choice` names."""
        choice = self.tool_choice
        if not isinstance(choice, ToolChoiceObject):
            return []
        if choice.function is not None and choice.type == "function":
            return [choice.function.name]
        return [] if choice.allowed_tools is None else [tool.function.name for tool in choice.allowed_tools.tools]

    @property
    def tool_mode(self) -> Literal["none", "auto", "required", "named"]:
        """Whether a tool may, must or must not be called."""
        choice = self.tool_choice
        if not self.tools or choice == "none":
            return "none"
        if isinstance(choice, ToolChoiceObject):
            if choice.type == "function":
                return "named"
            return "auto" if choice.allowed_tools is None else choice.allowed_tools.mode
        return choice or "auto"

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call, and is told of."""
        if self.tool_mode == "none":
            return []
        names = self.chosen_tool_names
        return [tool for tool in self.tools or () if not names or tool.function.name in names]

    @property
    def completion_limit(self) -> int | None:
        """Most tokens of the answer; `max_completion_tokens` wins over its older name."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None: not even the token's own probability."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def begins_message(self) -> bool:
        """True if the prompt ends with the beginning of a message of the assistant's."""
        return not self.continue_final_message and self.add_generation_prompt is not False


def _without(name: str, needed: str) -> PydanticCustomError:
    return PydanticCustomError(
        INVALID_COMBINATION, "'{name}' is only allowed together with {needed}.", {"name": name, "needed": needed}
    )
