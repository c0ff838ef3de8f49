"""What `--model` may say, and what is said back when there is no such model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from peagle.engine.checkpoint import resolve_checkpoint, resolve_head
from peagle.errors import ModelLoadError
from peagle.fetch import convert_default
from peagle.text import Tokenizer
from tests.unit.peagle.test_gguf_checkpoint import gguf_tensors, tiny_model, write_gguf


def resolve(model: str | Path) -> tuple[Path, list[str]]:
    """The directory, and what was reported on the way."""
    lines: list[str] = []
    return resolve_checkpoint(str(model), lines.append), lines


def add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(
        ["t", "0", "t0", *(f"t{token}" for token in range(3, 40))]
    )  # replaces a list that has no merges
    writer.add_token_merges(["t 0"])
    writer.add_token_types([1] * 40)


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    return write_gguf(tmp_path / "tiny.gguf", gguf_tensors(tiny_model(tied=True)), extra=add_tokenizer)


def test_a_directory_is_taken_as_it_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(checkpoint) == (checkpoint, [])
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert resolve(f"~/{checkpoint.name}")[0] == checkpoint
    monkeypatch.chdir(checkpoint.parent)
    assert resolve(checkpoint.name)[0].samefile(checkpoint)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json: give the directory"):
        resolve(tmp_path)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "~/nowhere", "nowhere", "a/b/c"])
def test_a_path_that_leads_nowhere_is_not_looked_for_on_the_hub(model: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"no directory {model}: give a checkpoint's directory, a \.gguf file"):
        resolve(model)


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(gguf: Path, tmp_path: Path) -> None:
    directory, lines = resolve(gguf)
    assert lines == ["Converting tiny.gguf, once ..."]
    assert directory.parent == tmp_path / "cache" / "gguf"
    assert directory.stat().st_mode & 0o055 == 0o055, "a shared cache is read by other users"
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        converted = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens).logits
        assert torch.equal(converted, tiny_model(tied=True)(tokens).logits)
    assert Tokenizer.from_directory(directory).eos_token_ids == {2}
    assert resolve(gguf) == (directory, [])
    os.utime(gguf, ns=(1, 1))
    again, lines = resolve(gguf)
    assert again != directory
    assert len(lines) == 1
    assert {path.name for path in directory.parent.iterdir()} == {directory.name, again.name}, "nothing is left over"


def test_a_gguf_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no file .*x\.gguf"):
        resolve(tmp_path / "x.gguf")


def test_a_conversion_that_fails_leaves_nothing_behind(gguf: Path, tmp_path: Path) -> None:
    gguf.write_bytes(b"not a model at all")
    with pytest.raises(ModelLoadError, match="cannot be read as GGUF"):
        resolve(gguf)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_cache_that_can_not_be_written_is_named(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(ModelLoadError, match=r"cannot write .*PEAGLE_CACHE"):
        resolve(gguf)


def test_a_conversion_that_another_process_finishes_first_is_used(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "peagle.engine.checkpoint.convert_default"

    def convert_slowly(path: Path, directory: Path) -> None:
        monkeypatch.setattr(name, convert_default)
        first = resolve(path)[0]  # the other process
        (first / "theirs").touch()
        convert_default(path, directory)

    monkeypatch.setattr(name, convert_slowly)
    assert (resolve(gguf)[0] / "theirs").is_file()


def test_a_hub_id_that_is_neither_cached_nor_reachable_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"'acme/none' from the hub .*check the name and the network.*directory"):
        resolve("acme/none")


def test_a_hub_id_in_the_cache_needs_no_network(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--acme--tiny", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((checkpoint / "config.json").read_text())
    directory, lines = resolve("acme/tiny")
    assert directory == snapshot
    assert len(lines) == 1
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"


def test_a_head_may_be_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights may be a pickle, which is not fetched of a target."""
    calls: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        calls.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    lines: list[str] = []
    assert resolve_head("somebody/a-head", lines.append) == tmp_path
    assert resolve_checkpoint("somebody/a-model", lines.append) == tmp_path
    assert [name for name, _ in calls] == ["somebody/a-head", "somebody/a-model"]
    assert ["pytorch_model*.bin" in patterns for _, patterns in calls] == [True, False]
    assert "somebody/a-head" in lines[0]


def test_a_heads_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_head(f"~/{tmp_path.name}", lambda line: None) == tmp_path
    with pytest.raises(ModelLoadError, match=r"must be the directory of a draft head, .*or a hub id .*nothing is none"):
        resolve_head(str(tmp_path / "nothing"), lambda line: None)
