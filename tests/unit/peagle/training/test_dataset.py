"""Which tokens are learned from: those that the target said, in the text that serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peagle.errors import ConfigError
from peagle.text.tokenizer import Tokenizer
from peagle.training.dataset import Example, encode_record, load_dataset
from tests.builders.tokenizer import CHATML_TEMPLATE, IM_END_ID, build_tokenizer_directory
from tests.unit.peagle.training.tiny_run import record, write_data


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(build_tokenizer_directory(tmp_path / "tokenizer"))


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def encode(tokenizer: Tokenizer, max_length: int = 1000, **fields: Any) -> Example:
    example = encode_record(fields, tokenizer, max_length=max_length)
    assert example is not None
    return example


def supervised_text(tokenizer: Tokenizer, example: Example) -> str:
    return tokenizer.decode(example.token_ids[example.is_supervised].tolist(), skip_special_tokens=False)


def test_an_answer_and_its_end_are_supervised(tokenizer: Tokenizer) -> None:
    messages = turns("hi", "hello there")
    example = encode(tokenizer, messages=messages, finish_reason="stop")
    assert supervised_text(tokenizer, example) == "hello there<|im_end|>"
    prompt = tokenizer.chat_template.render(messages[:1], add_generation_prompt=True)
    before = example.token_ids[~example.is_supervised].tolist()
    assert before == tokenizer.encode(prompt, add_special_tokens=False)  # as serving renders it
    assert example.token_ids[-1] == IM_END_ID  # the line feed that the template writes behind nobody generates


def test_every_assistant_turn_is_supervised(tokenizer: Tokenizer) -> None:
    example = encode(tokenizer, messages=turns("a", "one", "b", "two", "c"))
    assert supervised_text(tokenizer, example) == "one<|im_end|>two<|im_end|>"
    text = tokenizer.decode(example.token_ids.tolist(), skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>")


def test_a_cut_answer_has_no_end(tokenizer: Tokenizer) -> None:
    example = encode(tokenizer, messages=turns("a", "one tw"), finish_reason="length")
    assert supervised_text(tokenizer, example) == "one tw"


def test_whitespace_of_an_answer_is_kept(tokenizer: Tokenizer) -> None:
    example = encode(tokenizer, messages=turns("a", "\n\n  one  \n"))
    assert supervised_text(tokenizer, example) == "\n\n  one  \n<|im_end|>"


def test_an_answer_that_begins_with_whitespace_keeps_the_tokens_it_was_said_in(tokenizer: Tokenizer) -> None:
    messages = turns("a", "\n\none", "b", "two")  # one line feed more ends the prompt, and would merge
    first = encode(tokenizer, messages=messages[:2])
    prompt = tokenizer.encode(
        tokenizer.chat_template.render(messages[:1], add_generation_prompt=True), add_special_tokens=False
    )
    assert first.token_ids[: len(prompt)].tolist() == prompt
    assert not first.is_supervised[: len(prompt)].any()
    both = encode(tokenizer, messages=messages)
    assert supervised_text(tokenizer, both) == "two<|im_end|>"  # the history is tokenised as a whole, as in serving
    history = tokenizer.chat_template.render(messages[:3], add_generation_prompt=True)
    is_prompt = ~both.is_supervised
    assert both.token_ids[is_prompt].tolist() == tokenizer.encode(history, add_special_tokens=False)


def test_a_template_that_rewrites_answered_turns_is_refused(tmp_path: Path) -> None:
    # Spaces at the end of the generation prompt that an answered turn does not have.
    template = CHATML_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant:  ' }}{% endif %}")
    tokenizer = Tokenizer.from_directory(build_tokenizer_directory(tmp_path / "other", chat_template=template))
    with pytest.raises(ConfigError, match="cannot be told apart"):
        encode(tokenizer, messages=turns("a", "one"))


def test_a_long_conversation_is_cut(tokenizer: Tokenizer) -> None:
    whole = encode(tokenizer, messages=turns("a", "one two three"))
    cut = encode(tokenizer, max_length=len(whole.token_ids) - 3, messages=turns("a", "one two three"))
    assert np.array_equal(cut.token_ids, whole.token_ids[:-3])
    assert cut.num_response_tokens == whole.num_response_tokens - 3


def test_only_temperature_zero_is_greedy(tokenizer: Tokenizer) -> None:
    for temperature, is_greedy in ((0, True), (0.0, True), (0.7, False), (None, False)):
        assert encode(tokenizer, messages=turns("a", "b"), temperature=temperature).is_greedy is is_greedy


def test_the_end_of_each_file_is_held_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = [
        write_data(tmp_path / f"{name}.jsonl", [record(start + i) for i in range(5)])
        for name, start in (("a", 0), ("b", 5))
    ]
    dataset = load_dataset(files, tokenizer, max_length=1000, held_out=0.3)
    assert (len(dataset.train), len(dataset.held_out)) == (6, 4)
    keys = [encode(tokenizer, **record(number)).key for number in range(10)]
    assert [one.key for one in dataset.train] == [keys[i] for i in (0, 1, 2, 5, 6, 7)]
    assert len(set(keys)) == 10


def test_what_is_left_out_is_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = {"messages": turns("word " * 200, "short")}
    records = [record(1), {"messages": turns("only a question")}, long, record(2)]
    dataset = load_dataset([write_data(tmp_path / "d", records)], tokenizer, max_length=150, held_out=0.0)
    assert (len(dataset.train), dataset.num_without_answer, dataset.num_too_long) == (2, 1, 1)
    assert "1 without an answer, 1 with a prompt that is too long" in dataset.summary()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "is empty"),
        ([{"messages": turns("only a question")}], "1 conversations have no assistant turn"),
        ([{"messages": turns("word " * 200, "short")}], "1 have a prompt longer than 150 tokens"),
        ([{"text": "hello"}], "no 'messages'"),
        ([{"messages": ["hello"]}], "no 'messages'"),
    ],
)
def test_data_without_a_lesson_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, records: list[dict[str, Any]], message: str
) -> None:
    path = write_data(tmp_path / "data.jsonl", records)
    with pytest.raises(ConfigError, match=message):
        load_dataset([path], tokenizer, max_length=150, held_out=0.0)
