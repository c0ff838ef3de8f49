"""Where a checkpoint comes from: command line, commit, versions, data, machine, as a small JSON file beside it.

Owns the record. Refuses to know what is trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from peagle.benchmark.provenance import git_commit, machine, mask_secrets

FILE_NAME = "provenance.json"
_PACKAGES = ("peagle", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def describe(argv: Sequence[str], *, data_files: Sequence[Path]) -> dict[str, Any]:
    """All of it, ready for JSON, secrets masked. Reads each data file once, for its hash."""
    return {
        "argv": mask_secrets(argv),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_commit(Path(__file__).parent),
        "versions": {"python": platform.python_version(), **_versions()},
        "data": [describe_file(path) for path in data_files],
        "machine": {**machine(Path("/proc/cpuinfo")), "num_torch_threads": torch.get_num_threads(), "gpus": _gpus()},
        "num_processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def describe_file(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a file; its directory is this machine's own business."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "num_bytes": path.stat().st_size, "sha256": digest}


def write_provenance(directory: Path, provenance: dict[str, Any]) -> Path:
    """Write `provenance.json` into a directory that is there; a reader never sees half of it."""
    path = directory / FILE_NAME
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
