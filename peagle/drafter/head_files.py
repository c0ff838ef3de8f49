"""The files of a head: config.json, and weights in safetensors or in a pickled `pytorch_model.bin`.

Pickles are read with `weights_only`, which makes tensors and runs nothing. Owns finding and reading. Refuses to know
what a key or a tensor means.
"""

from __future__ import annotations

import json
import pickle
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from peagle.drafter.flat_layout import first_layer_prefix, to_file_name, to_parameter_name
from peagle.drafter.speculators_layout import flatten, is_speculators
from peagle.errors import ModelLoadError


class HeadFiles:
    """What is in a head's directory. Tensors go by the head's own names, whatever the layout is.

    Args:
        directory: holds config.json and the weights.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def config_values(self) -> dict[str, Any]:
        """config.json, in flat keys.

        Raises:
            ModelLoadError: it is missing or broken, or it describes no EAGLE-3 or P-EAGLE head.
        """
        path = self._directory / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelLoadError(f"no draft head at {path.parent}: config.json is missing") from None
        except (ValueError, OSError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from None
        if not isinstance(values, dict):
            raise ModelLoadError(f"{path} does not hold a JSON object")
        return flatten(values) if is_speculators(values) else values

    @cached_property
    def file_names(self) -> dict[str, str]:
        """By the head's own name of each tensor, its name in the files. No tensor is read.

        Raises:
            ModelLoadError: weights are missing or broken, or a tensor is given twice.
        """
        found: dict[str, str] = {}
        for path in _weight_files(self._directory):
            for file_name in _names(path):
                name = to_parameter_name(file_name)
                if name in found:
                    raise ModelLoadError(f"draft head: {file_name} is given twice")
                if name is not None:
                    found[name] = file_name
        return found

    def file_name(self, name: str) -> str:
        """The name in the files of one of the head's tensors: what it is there, or what it would be."""
        file_names = self.file_names
        prefix = first_layer_prefix(list(file_names.values()))
        return file_names.get(name) or to_file_name(name, first_layer=prefix)

    def read_tensors(self) -> dict[str, Tensor]:
        """All tensors, out of the files' mapping: aligned, and safe from changes to the files."""
        tensors: dict[str, Tensor] = {}
        names = {file_name: name for name, file_name in self.file_names.items()}
        for path in _weight_files(self._directory):
            for file_name, tensor in _load(path).items():
                if file_name in names:
                    tensors[names[file_name]] = tensor.clone()
        return tensors


def _weight_files(directory: Path) -> list[Path]:
    for stem, pattern in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin")):
        index = directory / f"{stem}.index.json"
        if index.exists():
            return _listed_files(index)
        files = sorted(directory.glob(pattern))
        if files:
            return files
    raise ModelLoadError(f"no weights in {directory}: neither *.safetensors nor pytorch_model.bin")


def _listed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"cannot read {index}: {error!r}") from None
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise ModelLoadError(f"draft head: {index.name} lists files that are missing: {', '.join(missing)}")
    return [index.parent / name for name in names]


def _names(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_load(path))
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelLoadError(f"cannot read {path}: it holds more than weights, or is damaged ({reason})") from None
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ModelLoadError(f"cannot read {path}: it must hold a dictionary of tensors by name")
    return found


def _is_zip(path: Path) -> bool:
    """Whether torch can map the file instead of reading it; files from before torch 1.6 are no archives."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"
