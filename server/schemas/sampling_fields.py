"""The fields that chat and text completions share: how to sample, when to stop, what to report, how to stream.

Owns names, types and descriptions. Refuses to know ranges of sampling parameters: `SamplingParams` checks those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from server.errors import INVALID_COMBINATION
from server.schemas.client_model import MAX_INT, MAX_ITEMS, ClientModel, Stop, TokenId, param
from server.schemas.formats import ResponseFormat, StructuredOutputs

MAX_N = 128
_USE_STRUCTURED = "send 'structured_outputs' instead"
REFUSED_EVERYWHERE: Mapping[str, str] = {
    "best_of": "ask for 'n' answers and choose",
    "use_beam_search": "answers are sampled, token by token",
    "guided_json": _USE_STRUCTURED,
    "guided_regex": _USE_STRUCTURED,
    "guided_choice": _USE_STRUCTURED,
    "guided_grammar": _USE_STRUCTURED,
    "logits_processors": "no code of clients is run",
    "kv_transfer_params": "the KV cache stays in this process",
}


class StreamOptions(ClientModel):
    """How to stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # nothing is padded here, so there is nothing to leave out


class SamplingFields(ClientModel):
    """What both kinds of completions can be asked for."""

    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_EVERYWHERE

    model: str = Field(description="One of the served names.", json_schema_extra={"x-others": "OVSL"})
    n: int | None = param(
        "Number of answers. The prompt is computed and counted once; answer i is sampled with `seed` + i, and greedy "
        "answers are equal.", default="1", others="OVSL", ge=1, le=MAX_N,
    )  # fmt: skip
    temperature: float | None = param(
        "Logits are divided by it; 0 takes the likeliest token.",
        range="0 to 2", default="1", others="OVSL", bounds={"minimum": 0, "maximum": 2},
    )  # fmt: skip
    top_p: float | None = param(
        "Keeps the likeliest tokens that together reach this probability.",
        range="above 0, to 1", default="1", others="OVSL", bounds={"exclusiveMinimum": 0, "maximum": 1},
    )  # fmt: skip
    top_k: int | None = param(
        "Keeps so many of the likeliest tokens; 0 or -1 keeps all.",
        range="-1 or more", default="0", others="VSL", bounds={"minimum": -1, "maximum": MAX_INT},
    )  # fmt: skip
    min_p: float | None = param(
        "Keeps tokens at least so likely, relative to the likeliest.",
        range="0 to 1", default="0", others="VSL", bounds={"minimum": 0, "maximum": 1},
    )  # fmt: skip
    seed: int | None = param(
        "Key of the noise: the same request with the same seed repeats.",
        range="64 bits, signed", default="drawn", others="OVSL", bounds={"minimum": -(2**63), "maximum": 2**63 - 1},
    )  # fmt: skip
    presence_penalty: float | None = param(
        "Taken off the logit of each token that the answer has already.",
        range="-2 to 2", default="0", others="OVSL", bounds={"minimum": -2, "maximum": 2},
    )  # fmt: skip
    frequency_penalty: float | None = param(
        "Taken off once for every time that the answer has the token.",
        range="-2 to 2", default="0", others="OVSL", bounds={"minimum": -2, "maximum": 2},
    )  # fmt: skip
    repetition_penalty: float | None = param(
        "Makes tokens of prompt and answer less likely, by a factor on the logit.",
        range="above 0, to 10", default="1", others="VSL", bounds={"exclusiveMinimum": 0, "maximum": 10},
    )  # fmt: skip
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_ITEMS)] | None = param(
        "Added to the logits of tokens, by token id.", range="each -100 to 100", default="none", others="OVSL"
    )
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = param(
        "The only tokens that the answer may have.", range="not empty", default="all", others="V",
        bounds={"minItems": 1},
    )  # fmt: skip
    bad_words: Annotated[list[str], Field(max_length=1024, fail_fast=True)] | None = param(
        "Words that the answer must not have, as the tokens that spell them with and without a space before.",
        default="none", others="V",
    )  # fmt: skip
    max_tokens: int | None = param("Most tokens of an answer.", default="what the context holds", others="OVSL")
    min_tokens: int | None = param(
        "The answer does not end before it has so many tokens.",
        range="0 to max_tokens", default="0", others="VS", bounds={"minimum": 0},
    )  # fmt: skip
    stop: Stop | None = param(
        "Strings that end the answer.", range="at most 4, each of 1 to 4096 characters", default="none", others="OVSL"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = param(
        "Token ids that end the answer.", default="none", others="VS"
    )
    include_stop_str_in_output: bool | None = param(
        "Keep the stop string, or the stop token's text, at the end of the answer.", default="false", others="VS"
    )
    ignore_eos: bool | None = param("Go on past the end-of-sequence token.", default="false", others="VSL")
    skip_special_tokens: bool | None = param("Leave special tokens out of the text.", default="true", others="VS")
    response_format: ResponseFormat | None = param(
        "Hold the answer to JSON, or to a JSON schema.", default="text", others="OVSL"
    )
    structured_outputs: StructuredOutputs | None = param(
        "Hold the answer to a JSON schema, a regular expression, a list of choices or a grammar.",
        default="none", others="V",
    )  # fmt: skip
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = param(
        "Report the log probability of each token of the prompt, and those of so many likeliest ones.",
        default="none", others="V",
    )  # fmt: skip
    return_token_ids: bool | None = param(
        "Report the token ids of prompt and answer, as `prompt_token_ids` and `token_ids`.",
        default="false", others="V",
    )  # fmt: skip
    return_metrics: bool | None = param(
        "Report what speculation did for this request and how long it took, as `metrics`, with vLLM's names.",
        default="false",
    )  # fmt: skip
    truncate_prompt_tokens: int | None = param(
        "Keep only so many tokens at the end of the prompt; -1 keeps what the context holds.",
        range="-1, or 1 or more", default="off: a prompt that is too long is refused", others="V", le=MAX_INT,
        bounds={"minimum": -1, "not": {"const": 0}},
    )  # fmt: skip
    stream: bool | None = param("Send the answer as server-sent events.", default="false", others="OVSL")
    stream_options: StreamOptions | None = param(
        "`include_usage` ends a stream with the usage, `continuous_usage_stats` adds it to every chunk, "
        "`include_obfuscation` changes nothing.", range="with stream only", default="none", others="OVSL",
    )  # fmt: skip
    priority: int | None = param(
        "Lower runs first.", range="0 unless the server has --scheduling-policy priority", default="0", others="VS",
        ge=-MAX_INT, le=MAX_INT,
    )  # fmt: skip
    cache_salt: str | None = param(
        "Shares cached prefixes with requests of the same salt only.",
        range="1 to 128 characters, no slashes", default="none", others="VS", pattern=r"^[!-.0-\[\]-~]{1,128}$",
    )  # fmt: skip
    request_id: str | None = param(
        "Part of the answer's id, in place of a drawn one.",
        range="1 to 128 of A-Z a-z 0-9 . _ : -, not under way", default="drawn", others="VS",
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
    )  # fmt: skip
    user: str | None = param("Accepted, without effect.", others="OVS")

    @model_validator(mode="after")
    def refuse_what_has_no_effect_or_no_meaning(self) -> SamplingFields:
        """As OpenAI does with options of a stream that is none."""
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                INVALID_COMBINATION,
                "'{name}' is only allowed together with 'stream': true.",
                {"name": "stream_options"},
            )
        if self.structured_outputs is not None and self.response_format is not None:
            if self.response_format.type != "text":
                raise PydanticCustomError(
                    INVALID_COMBINATION,
                    "'{name}' and 'response_format' both say what the answer must be: send one of them.",
                    {"name": "structured_outputs"},
                )
        if self.truncate_prompt_tokens is not None and not (
            self.truncate_prompt_tokens == -1 or self.truncate_prompt_tokens >= 1
        ):
            raise PydanticCustomError(
                INVALID_COMBINATION,
                "Invalid value for '{name}': it must be -1, or 1 or more.",
                {"name": "truncate_prompt_tokens"},
            )
        return self

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk of a stream carries the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
Metadata = dict[str, Any]
