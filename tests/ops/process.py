"""A `peagle serve` of a tiny random model, as a process, and what a scenario asks it.

The model knows nothing and is fast, so a scenario measures the server around it. Owns starting, watching and ending.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.source_tree import ROOT

DEADLINE_S = 60.0
START_S = 240.0  # a busy machine takes its time to import torch
PATH = "/v1/chat/completions"
SMALL = ("--max-model-len", "512", "--num-kv-blocks", "192", "--num-threads", "1", "--dtype", "float32")


@dataclass(slots=True, eq=False)
class Server:
    """A running process. `log` is its stderr."""

    child: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=DEADLINE_S).status_code

    def ask(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{PATH}", json=body(**fields), timeout=DEADLINE_S)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=DEADLINE_S).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def rss_mb(self) -> float:
        return float(psutil.Process(self.child.pid).memory_info().rss) / 1e6

    def num_files(self) -> int:
        return int(psutil.Process(self.child.pid).num_fds())

    def is_idle(self) -> bool:
        """Nothing runs, waits or holds memory."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in (*names, "peagle_requests_under_way"))

    def becomes_idle(self) -> None:
        wait_for(self.is_idle, "the server did not become idle")


def body(**fields: Any) -> dict[str, Any]:
    """A request; the tiny model would seldom end an answer itself."""
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}


def wait_for(condition: Any, problem: str, *, within_s: float = DEADLINE_S) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, problem
        time.sleep(0.02)


def start(command: list[str], log: Path, *, stderr: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a Python program of the tree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (stderr or log).open("wb") as output:
        return subprocess.Popen([sys.executable, *command], stderr=output, stdout=output, env=environment)


def serve_command(model: Path, *flags: str, port: int = 0) -> list[str]:
    return ["-m", "server.cli", "serve", str(model), "--port", str(port), *SMALL, *flags]


@contextmanager
def running(command: list[str], log: Path) -> Iterator[Server]:
    """A process that is ready; killed at the end, if it still runs."""
    child = start(command, log)
    try:
        yield Server(child, wait_until_ready(child, log), log)
    finally:
        child.kill()
        child.wait(DEADLINE_S)


def wait_until_ready(child: subprocess.Popen[bytes], log: Path) -> str:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        text = log.read_text(encoding="utf-8", errors="replace")
        assert child.poll() is None, f"the server ended:\n{text}"
        urls = [line.rsplit("listening on ", 1)[1].strip() for line in text.splitlines() if "listening on " in line]
        if urls and httpx.get(f"{urls[0]}/ready", timeout=DEADLINE_S).status_code == 200:
            return urls[0]
        time.sleep(0.05)
    raise AssertionError(f"the server was not ready after {START_S:.0f} s")


def check_envelope(response: httpx.Response) -> str:
    """The code of an error, which must be told as every error is."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}, error
    assert error["message"]
    assert response.headers["x-request-id"]
    if response.status_code in (429, 503):
        assert float(response.headers["retry-after"]) >= 1
        assert float(response.headers["retry-after-ms"]) >= 1
    return str(error["code"])
