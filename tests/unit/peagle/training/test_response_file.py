"""A file of answers survives being cut anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.errors import ConfigError
from peagle.training.response_file import ResponseFile

RECORDS = [{"id": "a", "text": "ünï ☃"}, {"id": "b", "text": "\n"}, {"id": "c", "text": ""}]


def write(path: Path) -> bytes:
    with ResponseFile(path) as file:
        for record in RECORDS:
            file.append(record)
        assert file.ids == {"a", "b", "c"}
    return path.read_bytes()


def test_a_cut_at_any_byte_loses_at_most_the_last_record(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl")
    ends = [0, *(i + 1 for i, byte in enumerate(whole) if byte == ord("\n"))]
    path = tmp_path / "cut.jsonl"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with ResponseFile(path) as file:
            num_whole = sum(end <= cut for end in ends) - 1 + (cut + 1 in ends)  # without its end of line it is whole
            assert file.ids == {record["id"] for record in RECORDS[:num_whole]}
            for record in RECORDS[num_whole:]:
                file.append(record)
        assert path.read_bytes() == whole
        assert [json.loads(line) for line in path.read_text().splitlines()] == RECORDS


@pytest.mark.parametrize("text", ["buy milk\nand bread", "buy milk", "[]", "{'id'"])
def test_another_kind_of_file_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"no answer.*; give --output another file"):
        ResponseFile(path)
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*: Is a directory"):
        ResponseFile(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_says_how_to_go_on(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path / "answers.jsonl")
    file._file.close()
    file._file = open("/dev/full", "ab", buffering=0)
    with file, pytest.raises(ConfigError, match="No space left on device; make room and run the same command again"):
        file.append({"id": "a"})
