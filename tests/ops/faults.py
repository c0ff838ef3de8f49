"""Faults of the machine and the engine, each with the outcome that an operator may rely on."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.ops.faulty_server import EXCEPTION, HANG, NOT_A_NUMBER, OUT_OF_MEMORY
from tests.ops.process import (
    DEADLINE_S,
    PATH,
    Server,
    body,
    check_envelope,
    running,
    serve_command,
    start,
    wait_for,
    wait_until_ready,
)

NUM_STORM = 500
PAUSE_S = 3.0


def step_faults(model: Path, directory: Path) -> str:
    """An exception, a lack of memory and a row that is not a number fail their own request; its neighbour goes on."""
    command = ["-m", "tests.ops.faulty_server", str(model), "0"]
    with running(command, directory / "log") as server, ThreadPoolExecutor(4) as pool:
        alone = server.ask(seed=1, max_tokens=12).json()["choices"][0]["message"]["content"]
        for fault in (EXCEPTION, OUT_OF_MEMORY, NOT_A_NUMBER):
            good = pool.submit(server.ask, seed=1, max_tokens=12)
            bad = server.ask(seed=fault)
            assert bad.status_code == 500, (fault, bad.status_code, bad.text)
            assert check_envelope(bad) == "generation_failed"
            assert good.result().json()["choices"][0]["message"]["content"] == alone
        server.becomes_idle()
        assert server.health() == 200
        assert "Traceback" not in bad.text
    return "exception, no memory, NaN: 3 of 3 failed alone with 500, neighbours unchanged, blocks in use 0"


def stuck_step(model: Path, directory: Path) -> str:
    """A step that hangs turns /health to 503 while it does, which is what a liveness probe restarts."""
    command = ["-m", "tests.ops.faulty_server", str(model), "0"]
    with running(command, directory / "log") as server, ThreadPoolExecutor(1) as pool:
        began_at = time.monotonic()
        hanging = pool.submit(server.ask, seed=HANG, max_tokens=1)
        wait_for(lambda: server.health() == 503, "a hanging step was not noticed")
        noticed_s = time.monotonic() - began_at
        assert hanging.result().status_code == 200
        wait_for(lambda: server.health() == 200, "it stayed unhealthy")
    return f"/health said 503 after {noticed_s:.1f} s of a step that hung for 4 s, and 200 afterwards"


def stopped_process(model: Path, directory: Path) -> str:
    """SIGSTOP and SIGCONT in the middle of a stream: it goes on to its end."""
    with running(serve_command(model), directory / "log") as server:
        with httpx.stream("POST", server.url + PATH, json=body(stream=True, max_tokens=400), timeout=DEADLINE_S) as r:
            lines = r.iter_lines()
            first = next(lines)
            server.child.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            server.child.send_signal(signal.SIGCONT)
            rest = [first, *lines]
        assert rest[-2] == "data: [DONE]"
        assert server.health() == 200
        server.becomes_idle()
    return f"a stop of {PAUSE_S:.0f} s in mid-stream: the stream went on to [DONE]"


def storm(model: Path, directory: Path) -> str:
    """500 clients that connect and leave: idle, in mid-request, and in mid-answer. Nothing of them stays."""
    with running(serve_command(model), directory / "log") as server:
        server.ask()
        files, memory = server.num_files(), server.rss_mb()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
        content = httpx.Request("POST", server.url, json=body(stream=True, max_tokens=400)).content
        whole = head + b"Content-Length: %d\r\n\r\n" % len(content) + content
        for index in range(NUM_STORM):
            with socket.create_connection(server.address, DEADLINE_S) as client:
                client.sendall((b"", whole[: len(whole) // 2], whole)[index % 3])
        server.becomes_idle()
        wait_for(lambda: server.num_files() <= files + 2, "connections were left open")
        assert server.health() == 200
        assert server.ask().status_code == 200
        growth = server.rss_mb() - memory
        assert growth < 64, f"{growth:.0f} MB more"
    return f"{NUM_STORM} came and went: blocks in use 0, files open as before, memory {growth:+.1f} MB"


def taken_port(model: Path, directory: Path) -> str:
    """A port that is taken is told at once, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        began_at = time.monotonic()
        child = start(serve_command(model, port=taken.getsockname()[1]), directory / "log")
        code = child.wait(DEADLINE_S)
    text = (directory / "log").read_text()
    assert code == 1
    assert "choose another --host or --port" in text
    assert "Traceback" not in text
    return f"exit 1 after {time.monotonic() - began_at:.1f} s, with words and without a traceback"


def broken_weights(model: Path, directory: Path) -> str:
    """Weights that are cut short are refused by name, and end the process."""
    broken = directory / "tiny"
    shutil.copytree(model, broken)
    (weights,) = broken.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    child = start(serve_command(broken), directory / "log")
    code = child.wait(DEADLINE_S)
    text = (directory / "log").read_text()
    assert code == 1, text
    assert weights.name in text, text
    assert "Traceback" not in text, text
    return f"exit 1, the log names {weights.name}"


def full_disk(model: Path, directory: Path) -> str:
    """A log that cannot be written, because the disk is full, stops nobody."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    child = start(serve_command(model, port=port), directory / "log", stderr=Path("/dev/full"))
    url = f"http://127.0.0.1:{port}"
    (directory / "log").write_text(f"listening on {url}\n")
    try:
        wait_for(lambda: _is_there(url), "it did not start")
        server = Server(child, wait_until_ready(child, directory / "log"), directory / "log")
        assert all(server.ask().status_code == 200 for _ in range(5))
    finally:
        child.kill()
        child.wait(DEADLINE_S)
    return "the log on a full disk: started, 5 of 5 answered"


def _is_there(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 200
    except httpx.TransportError:
        return False
