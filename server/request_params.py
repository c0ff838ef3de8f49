"""From the fields of a request to the engine's sampling parameters.

Owns the translation: names, defaults that differ from the engine's, token ids written as text, words to tokens. Refuses
to know ranges (`SamplingParams` checks them) and prompts.
"""

from __future__ import annotations

import json
from typing import Any

from peagle import GrammarSpec, SamplingParams
from peagle.errors import InvalidParameterError
from peagle.text import Tokenizer
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.formats import StructuredOutputs
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
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    values["top_k"] = 0 if body.top_k == -1 else body.top_k  # clients of vLLM write "all tokens" as -1
    values["stop"] = None if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    values["stop_token_ids"] = None if body.stop_token_ids is None else frozenset(body.stop_token_ids)
    values["allowed_token_ids"] = None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids)
    values["logit_bias"] = None if body.logit_bias is None else _biases(body.logit_bias)
    values["bad_words"] = None if body.bad_words is None else _spellings(body.bad_words, tokenizer)
    values["grammar"] = _grammar(body)
    values |= wanted
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _grammar(body: SamplingFields) -> GrammarSpec | None:
    """The language that the answer is held to."""
    wanted, response_format = body.structured_outputs, body.response_format
    if wanted is not None:
        return _structured(wanted)
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object" or response_format.json_schema is None:
        return GrammarSpec(kind="json_object", text="")
    schema = response_format.json_schema.schema_
    return GrammarSpec(
        kind="json_schema",
        text=json.dumps({} if schema is None else schema),
        param="response_format.json_schema.schema",
    )


def _structured(wanted: StructuredOutputs) -> GrammarSpec:
    if wanted.json_ is not None:
        text = wanted.json_ if isinstance(wanted.json_, str) else json.dumps(wanted.json_)
        return GrammarSpec(kind="json_schema", text=text, param="structured_outputs.json")
    if wanted.regex is not None:
        return GrammarSpec(kind="regex", text=wanted.regex, param="structured_outputs.regex")
    if wanted.choice is not None:
        return GrammarSpec(kind="choice", text=json.dumps(wanted.choice), param="structured_outputs.choice")
    if wanted.grammar is not None:
        return GrammarSpec(kind="grammar", text=wanted.grammar, param="structured_outputs.grammar")
    return GrammarSpec(kind="json_object", text="", param="structured_outputs.json_object")


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
