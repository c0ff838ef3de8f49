"""The record beside a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from peagle.training.provenance import describe, write_provenance


def test_the_record_names_command_code_data_and_machine(tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl"
    data.write_bytes(b"{}\n")
    record = describe(["peagle", "train", "run", "--api-key", "secret"], data_files=[data])
    assert record["argv"] == ["peagle", "train", "run", "--api-key", "***"]
    assert record["data"] == [{"name": "answers.jsonl", "num_bytes": 3, "sha256": hashlib.sha256(b"{}\n").hexdigest()}]
    assert {"python", "torch", "transformers", "peagle"} <= record["versions"].keys()
    assert record["machine"]["num_torch_threads"] >= 1
    assert str(tmp_path) not in json.dumps(record)


def test_it_is_written_whole(tmp_path: Path) -> None:
    record = describe([], data_files=[])
    path = write_provenance(tmp_path, record)
    assert json.loads(path.read_text()) == record
    assert [entry.name for entry in tmp_path.iterdir()] == ["provenance.json"]
