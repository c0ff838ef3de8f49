"""What a client may ask of `POST /v1/completions`.

Owns the fields that only text completions have. Refuses to know how they are served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.errors import INVALID_COMBINATION
from server.schemas.client_model import MAX_INT, TokenId, param
from server.schemas.sampling_fields import REFUSED_EVERYWHERE, SamplingFields

MAX_PROMPTS = 1024  # prompts times answers to each, too
MAX_PROMPT_TOKENS = 2**21  # longer than any context


def _prompt_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list) or not value:
        return None
    if isinstance(value[0], str):
        return "<texts>"
    return "<lists>" if isinstance(value[0], list) else "<ids>"


_TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[_TokenIds, Tag("<ids>")]
    | Annotated[list[_TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<lists>")],
    Discriminator(
        _prompt_shape,
        custom_error_type="prompt",
        custom_error_message="Input should be a string, token ids, or a list of either, and not empty",
    ),
]


class CompletionRequest(SamplingFields):
    """What is asked of `POST /v1/completions`."""

    refused_fields: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        "suffix": "this model was not trained to fill gaps",
        "prompt_embeds": "send text or token ids",
    }

    prompt: Prompt = Field(
        description="A text, a list of token ids, or a list of either; each prompt gets `n` answers, in order.",
        json_schema_extra={"x-others": "OVSL"},
    )
    max_tokens: int | None = param(
        "Most tokens of an answer; 0 computes the prompt only.", default="16", others="OVSL", ge=0, le=MAX_INT
    )
    echo: bool | None = param("Begin the answer with the prompt.", default="false", others="OVS")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = param(
        "Report the log probability of each token, and those of so many likeliest ones; with `echo` of the prompt too.",
        default="none", others="OVS",
    )  # fmt: skip
    add_special_tokens: bool | None = param(
        "Put the tokenizer's usual special tokens, such as a begin of sequence, around a text.",
        default="true", others="V",
    )  # fmt: skip

    @model_validator(mode="after")
    def refuse_too_many_choices(self) -> CompletionRequest:
        """Each answer to each prompt is a request of its own to the engine."""
        if self.num_prompts * self.num_choices > MAX_PROMPTS:
            raise PydanticCustomError(
                INVALID_COMBINATION,
                "'{name}' times the number of prompts is {number}; at most {most} answers can be asked for at once.",
                {"name": "n", "number": self.num_prompts * self.num_choices, "most": MAX_PROMPTS},
            )
        return self

    @property
    def num_prompts(self) -> int:
        """Prompts in this request."""
        return len(self.prompts)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt, as text or as token ids."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]

    @property
    def completion_limit(self) -> int:
        """Most tokens of an answer. OpenAI's default is small, and clients of completions count on it."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None: not even the token's own probability."""
        return self.logprobs
