"""What one request asks of sampling, checked once at the door.

Owns ranges and defaults. Refuses to know torch, HTTP and text: stop strings are carried here, matched in `text`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from peagle.errors import InvalidParameterError

MAX_SEED = 2**63
MAX_TOP_K = 2**31 - 1  # larger than any vocabulary
MAX_MAX_TOKENS = 2**31 - 1  # longer than any context
MAX_STOP_LENGTH = 4096  # characters; each held-back one delays a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling knobs of one request.

    Attributes:
        temperature: 0 means greedy; otherwise logits are divided by it. Range [0, 2].
        top_p: smallest set of most likely tokens whose probability reaches top_p stays. Range (0, 1].
        top_k: number of most likely tokens that stay; 0 means all.
        seed: key of the noise. With the same seed, parameters and build a request repeats exactly. None: the
            engine draws one.
        max_tokens: most tokens to generate, 1 to 2**31 - 1. None: as many as the context holds.
        stop: strings that end the answer and are not part of it. At most 4, none empty or longer than 4,096 characters.
        stop_token_ids: token ids that end the answer, beside the model's end-of-sequence ids.
        ignore_eos: go on past the end-of-sequence ids (load tests need it).

    Raises:
        InvalidParameterError: a value is out of range; `param` names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 2.0):
            raise InvalidParameterError(
                f"temperature must be between 0 and 2, got {self.temperature}", param="temperature"
            )
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidParameterError(f"top_p must be in (0, 1], got {self.top_p}", param="top_p")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise InvalidParameterError(f"top_k must be between 0 (off) and {MAX_TOP_K}", param="top_k")
        if self.seed is not None and not -MAX_SEED <= self.seed < MAX_SEED:
            raise InvalidParameterError("seed must fit in 64 bits, sign included", param="seed")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_MAX_TOKENS:
            raise InvalidParameterError(f"max_tokens must be between 1 and {MAX_MAX_TOKENS}", param="max_tokens")
        if len(self.stop) > 4:
            raise InvalidParameterError(f"stop takes at most 4 strings, got {len(self.stop)}", param="stop")
        if any(not text for text in self.stop):
            raise InvalidParameterError("stop must not contain an empty string", param="stop")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_LENGTH:
            raise InvalidParameterError(
                f"a stop string may have at most {MAX_STOP_LENGTH} characters, got {longest}", param="stop"
            )

    @property
    def is_greedy(self) -> bool:
        """True if every token is the argmax, so that no noise is needed."""
        return self.temperature == 0.0
