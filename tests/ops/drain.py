"""SIGTERM under load: nothing that was taken is lost, and nothing new is taken."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.ops.process import DEADLINE_S, PATH, Server, body, check_envelope, running, serve_command, wait_for

NUM_STREAMS = 8


def _stream(server: Server, max_tokens: int) -> list[str]:
    request = body(stream=True, max_tokens=max_tokens)
    with httpx.stream("POST", server.url + PATH, json=request, timeout=DEADLINE_S) as response:
        assert response.status_code == 200, response.read()
        return [line for line in response.iter_lines() if line]


def finish(model: Path, directory: Path) -> str:
    """Streams that run or wait go on to their end, new work is sent elsewhere, the process ends with 0."""
    flags = ("--max-num-seqs", "2", "--shutdown-timeout-s", "60")
    with running(serve_command(model, *flags), directory / "log") as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(_stream, server, 300) for _ in range(NUM_STREAMS)]
        wait_for(lambda: _num_under_way(server) == NUM_STREAMS, "the streams did not begin")
        server.child.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503, "it stayed ready")
        refused = server.ask()
        assert (refused.status_code, check_envelope(refused)) == (503, "server_shutting_down")
        assert refused.headers["x-should-retry"] == "true"
        ends = [stream.result()[-1] for stream in streams]
        assert ends == ["data: [DONE]"] * NUM_STREAMS
        assert server.child.wait(DEADLINE_S) == 0
    return f"{NUM_STREAMS} of {NUM_STREAMS} streams, 5 of which waited, ended whole; new work 503; exit 0"


def second_signal(model: Path, directory: Path) -> str:
    """The second SIGTERM ends streams with an error event and [DONE], at once."""
    with running(serve_command(model), directory / "log") as server, ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(_stream, server, 450) for _ in range(4)]
        wait_for(lambda: _num_under_way(server) == 4, "the streams did not begin")
        server.child.send_signal(signal.SIGTERM)
        server.child.send_signal(signal.SIGTERM)
        began_at = time.monotonic()
        lines = [stream.result() for stream in streams]
        assert server.child.wait(DEADLINE_S) == 0
        seconds = time.monotonic() - began_at
    assert all(line[-1] == "data: [DONE]" for line in lines)
    num_told = sum("server_shutting_down" in line[-2] for line in lines)
    return f"{num_told} of 4 streams ended with an error event, all with [DONE]; exit 0 after {seconds:.1f} s"


def _num_under_way(server: Server) -> int:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return round(sum(server.metric(name) for name in names))
