"""The bodies of `POST /tokenize` and `POST /detokenize`: vLLM's.

Owns their shape. Refuses to know tokenizers.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from server.errors import INVALID_COMBINATION
from server.schemas.client_model import MAX_ITEMS, ClientModel, TokenId
from server.schemas.completions import MAX_PROMPT_TOKENS
from server.schemas.messages import ChatMessage
from server.schemas.tools import MAX_TOOLS, Tool


class TokenizeRequest(ClientModel):
    """A text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def require_one_of_both(self) -> TokenizeRequest:
        """Text or messages."""
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(
                INVALID_COMBINATION, "Send either '{name}' or 'messages', and not both.", {"name": "prompt"}
            )
        return self

    @property
    def begins_message(self) -> bool:
        """True if the prompt ends with the beginning of a message of the assistant's."""
        return not self.continue_final_message and self.add_generation_prompt is not False


class TokenizeReply(BaseModel):
    """The token ids, how many they are, and how many fit."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(ClientModel):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


class DetokenizeReply(BaseModel):
    """The text, special tokens included."""

    prompt: str
