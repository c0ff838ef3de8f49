"""Reading prompts: everything wrong with a file is said at once, before hours of answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from peagle.errors import ConfigError
from peagle.training.prompts import read_prompts


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in records))
    return path


def test_records_keep_what_they_say(tmp_path: Path) -> None:
    full = {"id": "p1", "source": "dolly", "licence": "MIT", "lang": "en", "messages": [user("Hi")]}
    bare = {"messages": [user("Hi"), {"role": "assistant", "content": "Hello"}]}
    first, second = read_prompts(write(tmp_path / "chat.jsonl", full, "", bare))
    assert (first.id, first.index, first.source, first.licence) == ("p1", 0, "dolly", "MIT")
    assert (second.id, second.index, second.source, second.licence) == ("line-3", 2, "chat", None)
    assert second.messages == [user("Hi")]


def test_evaluation_sets_are_read_as_they_are_published(tmp_path: Path) -> None:
    records = [{"turns": ["one", "two"]}, {"prompt": "def f():"}, {"question": "1 + 1?", "answer": "2"}]
    plain = write(tmp_path / "eval.jsonl", *records)
    packed = tmp_path / "eval.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        texts = [prompt.messages for prompt in read_prompts(path)]
        assert texts == [[user("one")], [user("def f():")], [user("1 + 1?")]]


def test_licences_and_limit_choose(tmp_path: Path) -> None:
    records = [
        {"id": i, "licence": licence, "messages": [user("Hi")]} for i, licence in enumerate(["A", "B", "A", "A"])
    ]
    path = write(tmp_path / "chat.jsonl", *records)
    assert [prompt.index for prompt in read_prompts(path, licences=["A"], limit=2)] == [0, 2]
    with pytest.raises(ConfigError, match="is under C; there are A, B"):
        read_prompts(path, licences=["A", "C"])


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "has no prompts"),
        (["{"], "chat.jsonl:1 is not JSON"),
        (["[1]"], "chat.jsonl:1 is no JSON object"),
        ([{"messages": [user("a")]}, {"text": "b"}], "chat.jsonl:2 needs 'messages'"),
        ([{"prompt": ""}], "needs 'messages'"),
        ([{"messages": []}], "no user's turn"),
        ([{"messages": [user("a"), {"role": "system", "content": "b"}]}], "no user's turn"),
        ([{"id": "x", "messages": [user("a")]}] * 2, "'x' occurs twice"),
    ],
)
def test_broken_files_are_named_by_line(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prompts(write(tmp_path / "chat.jsonl", *records))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(tmp_path / "chat.jsonl")
