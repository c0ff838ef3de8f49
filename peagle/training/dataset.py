"""Conversations as tokens, and which of them the target said.

The text is rendered by the very template that serves, since a head that learned on other text drafts badly
(peagle.md 3.7). Owns reading, tokens and the loss mask, and says before an hour is lost what is wrong with the data.
Refuses to know models and tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peagle.errors import ConfigError, RequestError
from peagle.text.tokenizer import Tokenizer
from peagle.training.prompts import read_records


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """One conversation."""

    token_ids: npt.NDArray[np.int64]  # [n]
    is_supervised: npt.NDArray[np.bool_]  # [n], tokens of the assistant, the one that ends its turn included
    is_greedy: bool  # the answer is the target's likeliest, token by token

    @property
    def num_response_tokens(self) -> int:
        """Tokens that are learned from."""
        return int(self.is_supervised.sum())

    @property
    def key(self) -> str:
        """Name of the tokens, for caches."""
        return hashlib.sha256(self.token_ids.tobytes() + self.is_supervised.tobytes()).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """Conversations to learn from and to measure on, and what was left out."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    num_without_answer: int
    num_too_long: int

    @property
    def num_response_tokens(self) -> int:
        """Tokens to learn from in one epoch."""
        return sum(example.num_response_tokens for example in self.train)

    def summary(self) -> str:
        """One line for the terminal."""
        return (
            f"{len(self.train):,} conversations with {self.num_response_tokens:,} response tokens, "
            f"{len(self.held_out):,} held out; left out: {self.num_without_answer} without an answer, "
            f"{self.num_too_long} with a prompt that is too long"
        )


def load_dataset(paths: Sequence[Path], tokenizer: Tokenizer, *, max_length: int, held_out: float) -> Dataset:
    """Read chat JSONL; see `Example` for what becomes of a line.

    Raises:
        ConfigError: a file is empty or broken, or nothing is left to learn from.
    """
    train: list[Example] = []
    kept_back: list[Example] = []
    num_without_answer = num_too_long = 0
    for path in paths:
        records = [record for _, record in read_records(path)]
        if not records:
            raise ConfigError(f"{path} is empty")
        num_train = len(records) - math.ceil(held_out * len(records))
        for index, record in enumerate(records):
            example = encode_record(record, tokenizer, max_length=max_length)
            if example is None:
                num_without_answer += 1
            elif example.num_response_tokens == 0:
                num_too_long += 1
            else:
                (train if index < num_train else kept_back).append(example)
    dataset = Dataset(
        train=tuple(train),
        held_out=tuple(kept_back),
        num_without_answer=num_without_answer,
        num_too_long=num_too_long,
    )
    if not train:
        names = ", ".join(path.name for path in paths)
        raise ConfigError(
            f"nothing to learn from in {names}: {num_without_answer} conversations have no assistant turn, "
            f"{num_too_long} have a prompt longer than {max_length} tokens"
        )
    return dataset


def encode_record(record: dict[str, Any], tokenizer: Tokenizer, *, max_length: int) -> Example | None:
    """Tokens of one conversation, cut to `max_length`; None if no turn is the assistant's."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise ConfigError("a conversation has no 'messages', a list of objects with 'role' and 'content'")
    if not any(turn.get("role") == "assistant" for turn in messages):
        return None
    token_ids, is_supervised = _render(messages, tokenizer)
    if record.get("finish_reason") == "length":  # the template closes a turn that the target did not end
        last = len(token_ids) - 1
        if token_ids[last] in tokenizer.eos_token_ids:
            token_ids, is_supervised = token_ids[:last], is_supervised[:last]
    return Example(
        token_ids=np.array(token_ids[:max_length], dtype=np.int64),
        is_supervised=np.array(is_supervised[:max_length], dtype=np.bool_),
        is_greedy=record.get("temperature") == 0,
    )


def _render(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Tokens up to the end of the last assistant turn, and which of them are the assistant's."""
    token_ids: list[int] = []
    is_supervised: list[bool] = []
    for index, turn in enumerate(messages):
        if turn.get("role") != "assistant":
            continue
        prompt = _render_text(messages[:index], tokenizer, add_generation_prompt=True)
        text = _render_text(messages[: index + 1], tokenizer, add_generation_prompt=False)
        if not text.startswith(prompt):
            raise ConfigError(
                "the chat template writes an answered turn differently from an open one, so what the assistant said "
                "cannot be told apart; train with a template that does not"
            )
        before, after = (tokenizer.encode(one, add_special_tokens=False) for one in (prompt, text))
        if after[: len(before)] == before:
            answer = after[len(before) :]
        else:  # the answer begins with a space or line feed that would merge with the prompt's end; said, it does not
            answer = tokenizer.encode(text[len(prompt) :], add_special_tokens=False)
        if before[: len(token_ids)] != token_ids:  # as history, an earlier answer has other tokens than as it was said
            token_ids, is_supervised = [], []
        answer = _until_end(answer, tokenizer)
        is_supervised += [False] * (len(before) - len(token_ids)) + [True] * len(answer)
        token_ids = before + answer
    return token_ids, is_supervised


def _render_text(messages: list[dict[str, Any]], tokenizer: Tokenizer, *, add_generation_prompt: bool) -> str:
    try:
        return tokenizer.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
    except RequestError as error:
        raise ConfigError(f"a conversation cannot be rendered: {error}") from error


def _until_end(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """An answer ends with its end token; what the template writes behind it nobody generates."""
    for place, token_id in enumerate(token_ids):
        if token_id in tokenizer.eos_token_ids:
            return token_ids[: place + 1]
    return token_ids
