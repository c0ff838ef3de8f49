"""The server as a process: signals, exit codes, and a port that is taken."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from tests.builders.server import DEADLINE_S, chat_body, eventually_sync


@dataclass(slots=True, eq=False)
class ServerProcess:
    """A running child, and what it has logged."""

    child: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    def collect_log(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)

    def log(self) -> str:
        return "".join(self.lines)

    def ready_status(self) -> int:
        try:
            return httpx.get(f"{self.url}/ready", timeout=DEADLINE_S).status_code
        except httpx.TransportError:
            return 0

    def wait(self) -> int:
        return self.child.wait(DEADLINE_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server_process(mode: str) -> Iterator[ServerProcess]:
    port = free_port()
    command = [sys.executable, "-m", "tests.builders.scripted_server", str(port), mode]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        process = ServerProcess(child, f"http://127.0.0.1:{port}")
        reader = threading.Thread(target=process.collect_log)
        reader.start()
        try:
            yield process
        finally:
            child.kill()
            child.wait(DEADLINE_S)
            reader.join(DEADLINE_S)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_with_code_0(signal_number: signal.Signals) -> None:
    with server_process("slow") as process:
        eventually_sync(lambda: process.ready_status() == 200)
        process.child.send_signal(signal_number)
        assert process.wait() == 0


def test_running_requests_finish_before_the_process_ends() -> None:
    with server_process("slow") as process:
        eventually_sync(lambda: process.ready_status() == 200)
        url, body = f"{process.url}/v1/chat/completions", chat_body(stream=True)
        with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as response:  # here it is admitted
            process.child.send_signal(signal.SIGTERM)
            eventually_sync(lambda: "1 requests under way" in process.log())
            refused = httpx.post(url, json=body, timeout=DEADLINE_S)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutting_down")
            text = response.read().decode()
        assert '"content":"done"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert process.wait() == 0


def test_a_second_signal_does_not_wait() -> None:
    with server_process("endless") as process:
        eventually_sync(lambda: process.ready_status() == 200)
        with httpx.stream("POST", f"{process.url}/v1/chat/completions", json=chat_body(stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            process.child.send_signal(signal.SIGTERM)
            eventually_sync(lambda: "1 requests under way" in process.log())
            process.child.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert "server_shutting_down" in rest[-4]
        assert process.wait() == 0


def test_a_model_that_cannot_be_loaded_ends_the_process_with_words() -> None:
    with server_process("broken") as process:
        statuses = set()
        while process.child.poll() is None:
            statuses.add(process.ready_status())
        assert process.wait() == 1
    assert 503 in statuses
    assert "give --model a checkpoint directory" in process.log()
    assert "Traceback" not in process.log()


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = (
            "from server.main import run; from server.settings import *; import sys; "
            f"code = run(Settings(server=ServerConfig(port={port}))); "
            "assert 'torch' not in sys.modules; sys.exit(code)"
        )
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in child.stderr
    assert "Traceback" not in child.stderr
