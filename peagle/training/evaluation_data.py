"""The prompts, or recorded answers, that a head is measured on, as tokens in the serving template.

Owns the choice of lines and their tokens. Refuses to know models.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from peagle.errors import ConfigError
from peagle.text.tokenizer import Tokenizer
from peagle.training.dataset import encode_record
from peagle.training.prompts import Messages, read_prompts, read_records
from peagle.training.target_answers import Exchange


class AnswerSource(Enum):
    """Whose answers a head is measured on."""

    TARGET = "target"  # the target answers now
    RECORDED = "recorded"  # the file has its answers; only those at temperature 0 are taken


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Prompts to answer, or answers to take as they are."""

    prompts: tuple[tuple[int, ...], ...] = ()
    recorded: tuple[Exchange, ...] = ()
    num_skipped: int = 0

    @property
    def num_entries(self) -> int:
        """How many answers there will be."""
        return len(self.prompts) + len(self.recorded)


def read_evaluation_data(
    path: Path,
    tokenizer: Tokenizer,
    *,
    answers: AnswerSource,
    max_num_prompt_tokens: int,
    held_out: float = 1.0,
    limit: int | None = None,
) -> EvaluationData:
    """Read a file of prompts or of answers.

    Args:
        path: JSONL; see `read_prompts` for its lines.
        tokenizer: the target's.
        answers: whether its answers, if it has some, are taken.
        max_num_prompt_tokens: longer prompts are skipped and counted.
        held_out: share of the lines, from the end.
        limit: at most so many lines of these.

    Raises:
        ConfigError: nothing is left to measure on.
    """
    prompts = read_prompts(path)
    prompts = prompts[len(prompts) - math.ceil(held_out * len(prompts)) :][:limit]
    if answers is AnswerSource.RECORDED:
        records = dict(read_records(path))
        found = [_exchange(records[prompt.index], tokenizer) for prompt in prompts]
        recorded = tuple(one for one in found if one is not None and len(one.prompt_token_ids) <= max_num_prompt_tokens)
        data = EvaluationData(recorded=recorded, num_skipped=len(found) - len(recorded))
    else:
        tokens = [tuple(_encode(tokenizer, prompt.messages)) for prompt in prompts]
        short = tuple(one for one in tokens if len(one) <= max_num_prompt_tokens)
        data = EvaluationData(prompts=short, num_skipped=len(tokens) - len(short))
    if data.num_entries == 0:
        wanted = "greedy answer (temperature 0)" if answers is AnswerSource.RECORDED else "prompt"
        raise ConfigError(f"{path} has no {wanted} to measure on that fits the target's context")
    return data


def _exchange(record: dict[str, Any], tokenizer: Tokenizer) -> Exchange | None:
    """The recorded last answer, as training reads it; None if there is none, or a sampled one."""
    example = encode_record(record, tokenizer, max_length=sys.maxsize)
    if example is None or not example.is_greedy:
        return None
    (unsupervised,) = np.nonzero(~example.is_supervised)
    num_prompt_tokens = int(unsupervised[-1]) + 1
    token_ids = example.token_ids.tolist()
    return Exchange(
        prompt_token_ids=tuple(token_ids[:num_prompt_tokens]), answer_token_ids=tuple(token_ids[num_prompt_tokens:])
    )


def _encode(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    return tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False)
