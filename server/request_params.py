"""From the fields of a request to the engine's sampling parameters.

Owns the translation: names, defaults that differ from the engine's, token ids written as text, words to tokens. Refuses
to know ranges (`SamplingParams` checks them) and prompts.
"""

from __future__ import annotations

from typing import Any

from peagle import SamplingParams
from peagle.errors import InvalidParameterError
from peagle.text import Tokenizer
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.sampling_fields import SamplingFields

_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)


def chat_params(body: ChatCompletionRequest, tokenizer: Tokenizer) -> SamplingParams:
    """Of an answer to a conversation.

    Raises:
        InvalidParameterError: a value is out of range.
    """
    return _params(body, tokenizer, max_tokens=body.completion_limit, logprobs=body.num_logprobs)


def completion_params(body: CompletionRequest, tokenizer: Tokenizer) -> SamplingParams:
    """Of the continuation of a text. One token is sampled where none is asked for: the engine has no other way to read
    a prompt.

    Raises:
        InvalidParameterError: a value is out of range.
    """
    wanted = {"max_tokens": max(body.completion_limit, 1), "logprobs": body.num_logprobs}
    if body.echo and body.prompt_logprobs is None:
        wanted["prompt_logprobs"] = body.num_logprobs
    return _params(body, tokenizer, **wanted)


def _params(body: SamplingFields, tokenizer: Tokenizer, **wanted: int | None) -> SamplingParams:
    _refuse_unserved(body)
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    values["top_k"] = 0 if body.top_k == -1 else body.top_k  # clients of vLLM write "all tokens" as -1
    values["stop"] = None if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    values["stop_token_ids"] = None if body.stop_token_ids is None else frozenset(body.stop_token_ids)
    values["allowed_token_ids"] = None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids)
    values["logit_bias"] = None if body.logit_bias is None else _biases(body.logit_bias)
    values["bad_words"] = None if body.bad_words is None else _spellings(body.bad_words, tokenizer)
    values |= wanted
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _refuse_unserved(body: SamplingFields) -> None:
    """What has a schema already and no engine behind it yet."""
    response_format = body.response_format
    if response_format is not None and response_format.type != "text":
        raise InvalidParameterError(
            "'response_format' is not supported by this server: answers are text.",
            param="response_format",
            code="unsupported_parameter",
        )
    if body.structured_outputs is not None:
        raise InvalidParameterError(
            "'structured_outputs' is not supported by this server: answers are text.",
            param="structured_outputs",
            code="unsupported_parameter",
        )
    if isinstance(body, ChatCompletionRequest) and body.tool_mode != "none":
        raise InvalidParameterError(
            "'tools' are not supported by this server: leave them out, or send 'tool_choice': 'none'.",
            param="tools",
            code="unsupported_parameter",
        )


def _biases(logit_bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for token, bias in logit_bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise InvalidParameterError(
                f"logit_bias is by token id; {token[:100]!r} is none", param="logit_bias", code="invalid_value"
            )
        pairs.append((int(token), bias))
    return tuple(pairs)


def _spellings(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as its tokens, at the beginning of a text and behind a space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        if not word.strip():
            raise InvalidParameterError("bad_words must not have an empty word", param="bad_words")
        bare = word.lstrip(" ")
        found += [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")]
    return tuple(dict.fromkeys(found))
