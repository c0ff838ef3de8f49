"""From what `--model` says to a directory with a checkpoint.

Owns the four ways to name a model: the embedded default, a directory, a `.gguf` file and a hub id. Reads no weights.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from peagle.config import DEFAULT_MODEL
from peagle.errors import ModelLoadError
from peagle.fetch import cache_dir, convert_default, ensure_default_model
from peagle.heads.shipped import shipped_heads

Report = Callable[[str], None]

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_HUB_HEAD_FILES = ("*.json", "*.safetensors", "pytorch_model*.bin")  # EAGLE-3 heads were long published as pickles


def resolve_checkpoint(model: str, report: Report) -> Path:
    """The directory of a model's checkpoint; fetches or converts it first if it must.

    Args:
        model: the default's name, a directory, a `.gguf` file or a hub id (`organisation/name`).
        report: called with one line before anything that takes time.

    Raises:
        ModelLoadError: there is no such model, or it can't be fetched or converted; says what to do.
    """
    if model == DEFAULT_MODEL:
        return ensure_default_model(report)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path} has no config.json: give the directory of a transformers checkpoint")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"there is no file {path}")
        return _converted_gguf(path, report)
    if _looks_like_a_path(model):
        raise ModelLoadError(
            f"there is no directory {model}: give a checkpoint's directory, a .gguf file, a hub id such as "
            f"organisation/name, or {DEFAULT_MODEL}"
        )
    return _from_hub(model, _HUB_FILES, report)


def resolve_head(model: str, report: Report) -> Path:
    """The directory of a draft head; fetches it first if it must.

    Args:
        model: a directory, the name of a head that ships with the package, or a hub id (`organisation/name`).
        report: called with one line before anything that takes time.

    Raises:
        ModelLoadError: there is no such head, or it can't be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    shipped = {head.name: head.directory for head in shipped_heads()}
    if model in shipped:
        return shipped[model]
    if _looks_like_a_path(model):
        names = "".join(f", {name} (which ships with peagle)" for name in shipped)
        raise ModelLoadError(
            f"speculative_config.model must be the directory of a draft head{names}, or a hub id such as "
            f"organisation/name; {path} is none"
        )
    return _from_hub(model, _HUB_HEAD_FILES, report)


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") != 1


def _converted_gguf(path: Path, report: Report) -> Path:
    """The checkpoint made of a GGUF file; made once, and again when the file changes."""
    status = path.stat()
    stamp = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    name = f"{path.stem}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    directory = cache_dir() / "gguf" / name
    if directory.is_dir():
        return directory
    report(f"Converting {path.name}, once ...")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=directory.parent) as work:
            made = Path(work) / "model"
            made.mkdir()
            convert_default(path, made)
            made.rename(directory)
    except OSError as error:
        if not directory.is_dir():  # else another process was faster
            raise ModelLoadError(
                f"cannot write {directory}: {error}; PEAGLE_CACHE moves the cache to another directory"
            ) from error
    return directory


def _from_hub(model: str, patterns: Sequence[str], report: Report) -> Path:
    from huggingface_hub import snapshot_download

    report(f"Looking for {model} in the hub's cache, and on the hub ...")
    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except Exception as error:  # it lets the errors of its HTTP client through, whichever that is
        raise ModelLoadError(
            f"cannot get {model!r} from the hub ({type(error).__name__}): check the name and the network, or download "
            "it elsewhere and give its directory"
        ) from error
