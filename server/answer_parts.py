"""The parts that answers of all kinds are made of: usage, log probabilities, what speculation did.

Owns their JSON shapes: OpenAI's, and vLLM's where OpenAI has none. Refuses to know which answer they are part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from peagle import FinishReason, RequestOutput, TokenLogprobs, Usage, __version__
from peagle.text import Tokenizer

FINGERPRINT = f"peagle-{__version__}"  # the same build, seed and parameters give the same answer
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON has no word for


def finish_word(reason: FinishReason, *, has_calls: bool = False) -> str:
    """OpenAI's word for the end of an answer that did not fail. A call that was cut short ended by its length."""
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def usage_part(usage: Usage, *, num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself; bytes that are no character read as U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {
        "content": [
            {
                **_entry(tokenizer, one.token_id, one.logprob),
                "top_logprobs": [_entry(tokenizer, token_id, value) for token_id, value in one.top],
            }
            for one in logprobs
        ],
        "refusal": None,
    }


def prompt_part(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token and the likeliest ones."""
    return [None if one is None else _by_id(tokenizer, one) for one in logprobs]


def metrics_part(output: RequestOutput) -> dict[str, Any]:
    """vLLM's per-request metrics, of a last output."""
    part: dict[str, Any] = {}
    spec, times = output.spec_stats, output.times
    if spec is not None:
        per_pos = (spec.num_drafts, *spec.num_accepted_tokens_per_pos, 0)
        part["speculative_decoding"] = {
            "mean_acceptance_length": 1 + _ratio(spec.num_accepted_tokens, spec.num_drafts),
            "draft_acceptance_rate": _ratio(spec.num_accepted_tokens, spec.num_draft_tokens),
            "acceptance_histogram": [here - behind for here, behind in pairwise(per_pos)],
            "num_spec_steps": spec.num_drafts,
            "num_accepted_draft_tokens": spec.num_accepted_tokens,
            "num_draft_tokens": spec.num_draft_tokens,
        }
    if times is not None and times.first_token_s is not None:
        generation_s = times.total_s - times.first_token_s
        num_later = output.usage.completion_tokens - 1
        part |= {
            "time_to_first_token_ms": round(times.first_token_s * 1e3, 3),
            "queue_time_ms": round((times.queue_s or 0.0) * 1e3, 3),
            "generation_time_ms": round(generation_s * 1e3, 3),
            "mean_itl_ms": round(generation_s * 1e3 / num_later, 3) if num_later > 0 else None,
            "tokens_per_second": round(num_later / generation_s, 3) if generation_s > 0 else None,
        }
    return part


class TextLogprobs:
    """`choices[].logprobs` of a text completion, which count on from output to output.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0  # characters of the text before the next token

    def part(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of the next tokens. A token without a probability is the first one of a prompt."""
        tokens = [token_text(self._tokenizer, token_id) for token_id in token_ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if one is None else _finite(one.logprob) for one in logprobs],
            "top_logprobs": [None if one is None else self._top(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        pairs = [*one.top, (one.token_id, one.logprob)]
        return {token_text(self._tokenizer, token_id): _finite(value) for token_id, value in reversed(pairs)}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(spelled)}


def _by_id(tokenizer: Tokenizer, one: TokenLogprobs) -> dict[str, Any]:
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(one.top, start=1)]
    entries = {token_id: (value, rank) for token_id, value, rank in ranked} | {one.token_id: (one.logprob, one.rank)}
    return {
        str(token_id): {"logprob": _finite(value), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
        for token_id, (value, rank) in entries.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
