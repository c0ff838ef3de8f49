"""Which lines are measured on, and as which tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peagle.errors import ConfigError
from peagle.training.evaluation_data import AnswerSource, read_evaluation_data
from tests.builders.server import tiny_tokenizer
from tests.builders.tokenizer import IM_END_ID


def write(path: Path, num_lines: int, **fields: Any) -> Path:
    records = [
        {
            "temperature": 0,
            "finish_reason": "stop",
            "messages": [{"role": "user", "content": "a" * (i + 1)}, {"role": "assistant", "content": "hello"}],
        }
        | fields
        for i in range(num_lines)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prompt_text(num_letters: int) -> str:
    system = "<|im_start|>system\nYou are a tiny test model<|im_end|>\n"
    return f"{system}<|im_start|>user\n{'a' * num_letters}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("held_out", "limit", "letters"),
    [(1.0, None, [1, 2, 3, 4, 5]), (0.4, None, [4, 5]), (0.01, None, [5]), (1.0, 2, [1, 2])],
)
def test_the_last_lines_are_held_out(tmp_path: Path, held_out: float, limit: int | None, letters: list[int]) -> None:
    path = write(tmp_path / "data.jsonl", 5)
    data = read_evaluation_data(
        path,
        tiny_tokenizer(),
        answers=AnswerSource.TARGET,
        max_num_prompt_tokens=512,
        held_out=held_out,
        limit=limit,
    )
    texts = [tiny_tokenizer().decode(prompt, skip_special_tokens=False) for prompt in data.prompts]
    assert texts == [prompt_text(num) for num in letters]
    assert data.recorded == ()


def test_long_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", 5)
    third = len(tiny_tokenizer().encode(prompt_text(3), add_special_tokens=False))
    for answers in AnswerSource:
        data = read_evaluation_data(path, tiny_tokenizer(), answers=answers, max_num_prompt_tokens=third)
        assert (data.num_entries, data.num_skipped) == (3, 2)


@pytest.mark.parametrize(("finish_reason", "end"), [("stop", [IM_END_ID]), ("length", [])])
def test_a_recorded_answer_ends_as_the_target_ended_it(tmp_path: Path, finish_reason: str, end: list[int]) -> None:
    path = write(tmp_path / "data.jsonl", 1, finish_reason=finish_reason)
    data = read_evaluation_data(path, tiny_tokenizer(), answers=AnswerSource.RECORDED, max_num_prompt_tokens=512)
    (exchange,) = data.recorded
    assert list(exchange.answer_token_ids) == [*tiny_tokenizer().encode("hello", add_special_tokens=False), *end]
    assert tiny_tokenizer().decode(exchange.prompt_token_ids, skip_special_tokens=False) == prompt_text(1)


def test_without_a_greedy_answer_there_is_nothing_recorded(tmp_path: Path) -> None:
    for fields in ({"temperature": 0.7}, {"temperature": None}, {"messages": [{"role": "user", "content": "a"}]}):
        path = write(tmp_path / "data.jsonl", 2, **fields)
        with pytest.raises(ConfigError, match=r"no greedy answer \(temperature 0\) to measure on"):
            read_evaluation_data(path, tiny_tokenizer(), answers=AnswerSource.RECORDED, max_num_prompt_tokens=512)
