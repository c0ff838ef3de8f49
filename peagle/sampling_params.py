"""What one request asks of sampling, checked once at the door.

Owns ranges and defaults. Refuses to know torch, HTTP and text: stop strings are carried here, matched in `text`.
Refuses to know the vocabulary too: whether a token id exists is asked at the engine's door.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peagle.errors import InvalidParameterError

if TYPE_CHECKING:
    from peagle.grammar_spec import GrammarSpec

MAX_SEED = 2**63
MAX_TOP_K = 2**31 - 1  # larger than any vocabulary
MAX_MAX_TOKENS = 2**31 - 1  # longer than any context
MAX_STOP_LENGTH = 4096  # characters; each held-back one delays a stream
MAX_LOGPROBS = 20  # alternatives of one token
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling knobs of one request.

    They act in this order on the logits of every row: logit_bias, the three penalties, then what is forbidden; then
    temperature, min_p, top_k, top_p. A greedy row sees the first three as well. What is forbidden counts by strength:
    grammar, allowed_token_ids, bad_words, min_tokens; one that would leave no token at all of what the stronger ones
    have left is passed over for that token.

    Attributes:
        temperature: 0 means greedy; otherwise logits are divided by it. Range [0, 2].
        top_p: smallest set of most likely tokens whose probability reaches top_p stays. Range (0, 1].
        top_k: number of most likely tokens that stay; 0 means all.
        min_p: tokens stay that are at least min_p times as likely as the most likely one. Range [0, 1], 0 is off.
        presence_penalty: taken off the logit of each token that the answer has already. Range [-2, 2].
        frequency_penalty: as that, once for every time that the answer has it. Range [-2, 2].
        repetition_penalty: a positive logit is divided by it, a negative one multiplied, for each token that prompt or
            answer have already. Range (0, 10], 1 is off.
        logit_bias: pairs of a token id and what is added to its logit, -100 to 100; each id once.
        allowed_token_ids: the only tokens that the answer may have; None: all.
        bad_words: sequences of token ids that the answer must not contain.
        min_tokens: the answer goes on for so many tokens at least: before, no token that ends it is sampled and no stop
            string is looked for.
        seed: key of the noise. With the same seed, parameters and build a request repeats exactly. None: the
            engine draws one.
        max_tokens: most tokens to generate, 1 to 2**31 - 1. None: as many as the context holds.
        stop: strings that end the answer and are not part of it. At most 4, none empty or longer than 4,096 characters.
        stop_token_ids: token ids that end the answer, beside the model's end-of-sequence ids.
        ignore_eos: go on past the end-of-sequence ids (load tests need it).
        include_stop_str_in_output: the text ends with the stop string, or the text of the stop token, that ended it.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: with each token of the answer its log probability, and those of so many most likely ones; 0 to 20.
        prompt_logprobs: the same of each token of the prompt but the first, whose probability nobody knows.
        visible_special_tokens: special tokens that stay in the text even so, by their text; those that the vocabulary
            does not have are nothing.
        grammar: the language that the answer must belong to.

    Raises:
        InvalidParameterError: a value is out of range; `param` names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    visible_special_tokens: frozenset[str] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        self._check_distribution()
        self._check_penalties()
        self._check_token_ids()
        self._check_length()
        self._check_stop()
        self._check_logprobs()

    @property
    def is_greedy(self) -> bool:
        """True if every token is the argmax, so that no noise is needed."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if a token's logit depends on the tokens before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def adjusts_logits(self) -> bool:
        """True if the logits are changed, or some forbidden, before the temperature. `grammar` is not asked."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens
        )

    def _check_distribution(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidParameterError(f"top_p must be in (0, 1], got {self.top_p}", param="top_p")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise InvalidParameterError(f"top_k must be between 0 (off) and {MAX_TOP_K}", param="top_k")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None and not -MAX_SEED <= self.seed < MAX_SEED:
            raise InvalidParameterError("seed must fit in 64 bits, sign included", param="seed")

    def _check_penalties(self) -> None:
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (math.isfinite(self.repetition_penalty) and 0.0 < self.repetition_penalty <= 10.0):
            raise InvalidParameterError(
                f"repetition_penalty must be in (0, 10], got {self.repetition_penalty}", param="repetition_penalty"
            )
        for token_id, bias in self.logit_bias:
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise InvalidParameterError(
                    f"a logit_bias must be between -100 and 100, got {bias} for token id {token_id}", param="logit_bias"
                )
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidParameterError("logit_bias names a token id twice", param="logit_bias")

    def _check_token_ids(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameterError(
                "allowed_token_ids must not be empty: no token could be sampled", param="allowed_token_ids"
            )
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidParameterError(
                f"bad_words takes at most {MAX_BAD_WORDS} words, got {len(self.bad_words)}", param="bad_words"
            )
        if not all(1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words):
            raise InvalidParameterError(f"a bad word must have 1 to {MAX_BAD_WORD_TOKENS} tokens", param="bad_words")

    def _check_length(self) -> None:
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_MAX_TOKENS:
            raise InvalidParameterError(f"max_tokens must be between 1 and {MAX_MAX_TOKENS}", param="max_tokens")
        if not 0 <= self.min_tokens <= MAX_MAX_TOKENS:
            raise InvalidParameterError(f"min_tokens must be between 0 and {MAX_MAX_TOKENS}", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens ({self.min_tokens}) must not be more than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )

    def _check_stop(self) -> None:
        if len(self.stop) > 4:
            raise InvalidParameterError(f"stop takes at most 4 strings, got {len(self.stop)}", param="stop")
        if any(not text for text in self.stop):
            raise InvalidParameterError("stop must not contain an empty string", param="stop")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_LENGTH:
            raise InvalidParameterError(
                f"a stop string may have at most {MAX_STOP_LENGTH} characters, got {longest}", param="stop"
            )

    def _check_logprobs(self) -> None:
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidParameterError(f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}", param=name)


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise InvalidParameterError(f"{name} must be between {least:g} and {most:g}, got {value}", param=name)
