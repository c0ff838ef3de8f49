"""Where a head's weights are found, and that reading them runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle.drafter.head_files import HeadFiles
from peagle.errors import ModelLoadError
from tests.builders.head import TINY_TARGET, write_tiny_head
from tests.builders.published_heads import plain_eagle3


class Surprise:
    """What a hostile pickle does when it is read without care."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


def read(directory: Path) -> dict[str, Tensor]:
    return HeadFiles(directory).read_tensors()


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickled_weights_are_those_that_were_saved(is_zip: bool, tmp_path: Path) -> None:
    published = plain_eagle3()
    published.write(tmp_path)
    torch.save(published.tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    found = read(tmp_path)
    assert len(found) == len(published.tensors) - 1  # all but t2d
    assert torch.equal(found["layers.0.self_attn.q_proj.weight"], published.tensors["midlayer.self_attn.q_proj.weight"])


def test_sharded_pickles(tmp_path: Path) -> None:
    published = plain_eagle3()
    published.write(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    parts = {f"pytorch_model-0000{i}-of-00002.bin": list(published.tensors)[i::2] for i in range(2)}
    for part, names in parts.items():
        torch.save({name: published.tensors[name] for name in names}, tmp_path / part)
    index = {"weight_map": {name: part for part, names in parts.items() for name in names}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert len(read(tmp_path)) == len(published.tensors) - 1
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(ModelLoadError, match="files that are missing: pytorch_model-00001"):
        read(tmp_path)


def test_safetensors_win_over_pickles(tmp_path: Path) -> None:
    write_tiny_head(tmp_path, TINY_TARGET)
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert "other" not in read(tmp_path)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    plain_eagle3().write(tmp_path)
    torch.save({"fc.weight": Surprise(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: it holds more than weights"):
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a pickle"])
def test_damaged_pickles(content: bytes, tmp_path: Path) -> None:
    plain_eagle3().write(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"cannot read .*pytorch_model\.bin"):
        read(tmp_path)


def test_a_pickle_must_hold_tensors_by_name(tmp_path: Path) -> None:
    plain_eagle3().write(tmp_path)
    torch.save({"state_dict": {"fc.weight": torch.zeros(1)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="dictionary of tensors by name"):
        read(tmp_path)


def test_names_are_known_without_reading_weights(tmp_path: Path) -> None:
    write_tiny_head(tmp_path, TINY_TARGET)
    files = HeadFiles(tmp_path)
    assert set(files.file_names.values()) == load_file(tmp_path / "model.safetensors").keys() - {"t2d"}
    assert files.file_name("layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert files.file_name("layers.1.mlp.gone") == "layers.1.mlp.gone"


@pytest.mark.parametrize(("text", "reason"), [(None, "is missing"), ("{", "cannot read"), ("[]", "JSON object")])
def test_broken_config(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=reason):
        HeadFiles(tmp_path).config_values  # noqa: B018
