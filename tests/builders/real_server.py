"""`peagle serve` as a process with the default model, for tests that need the real thing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from peagle.config import DEFAULT_MODEL
from peagle.fetch import DEFAULT_SOURCE, default_model_directory, is_whole

READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RealServer:
    """A server that is ready."""

    url: str
    process: psutil.Process
    model: str = DEFAULT_MODEL

    @property
    def api(self) -> str:
        """Base URL for the OpenAI SDK."""
        return f"{self.url}/v1"

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def real_model_directory() -> Path:
    """The default model's checkpoint; skips the test where it has not been fetched."""
    directory = default_model_directory()
    if not is_whole(directory, DEFAULT_SOURCE):
        pytest.skip("the default model is not fetched; run `peagle fetch`")
    return directory


@contextmanager
def real_server(*flags: str) -> Iterator[RealServer]:
    """Run `peagle serve` on a free port until the block ends."""
    real_model_directory()
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", *flags]
        child = subprocess.Popen(command, stderr=log, stdout=log, text=True)
        try:
            url = _wait_until_ready(child, log)
            yield RealServer(url=url, process=psutil.Process(child.pid))
        finally:
            child.terminate()
            child.wait(30)


def _wait_until_ready(child: subprocess.Popen[str], log: IO[str]) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        # Not `seek`: the child writes at the same offset.
        text = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
        assert child.poll() is None, f"the server ended:\n{text}"
        for line in text.splitlines():
            if "listening on " in line:
                url = line.rsplit("listening on ", 1)[1].strip()
                if httpx.get(f"{url}/ready").status_code == 200:
                    return url
        time.sleep(0.1)
    raise TimeoutError(f"the server was not ready after {READY_TIMEOUT_S:.0f} s")
