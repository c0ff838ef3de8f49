"""Two servers behind `vllm-router`: a rolling restart under load, and a replica that is killed.

The router is a program of its own, in a virtual environment of its own (`--tools`). Owns starting it and the load of
streams through it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.ops.process import DEADLINE_S, PATH, Server, body, running, serve_command, wait_for

NUM_CLIENTS = 4
NUM_TOKENS = 60
PREFIXES = tuple(f"{name} " * 40 for name in ("aa", "bb", "cc", "dd"))


class RouterMissingError(Exception):
    """vllm-router is not installed."""


@dataclass(slots=True)
class Streams:
    """What clients of the router saw."""

    num_done: int = 0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, url: str, **fields: Any) -> bool:
        """One stream; true if it came whole."""
        failure = _stream(url, **fields)
        with self.lock:
            if failure is None:
                self.num_done += 1
            else:
                self.failures.append(failure)
        return failure is None


def rolling_restart(model: Path, directory: Path, *, router: Path) -> str:
    """Each replica is drained, ends and comes back, while clients stream: none of them notices."""
    ports = (_free_port(), _free_port())
    with ExitStack() as stack:
        servers = [_replica(stack, model, directory / f"log-{port}", port) for port in ports]
        url = stack.enter_context(_routing(router, servers, directory, policy="round_robin"))
        streams, is_over = Streams(), threading.Event()

        def work() -> None:
            while not is_over.is_set():
                streams.ask(url)

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            try:
                clients = [pool.submit(work) for _ in range(NUM_CLIENTS)]
                wait_for(lambda: streams.num_done >= 2 * NUM_CLIENTS, "nothing came through the router")
                for index, port in enumerate(ports):
                    servers[index].child.send_signal(signal.SIGTERM)
                    assert servers[index].child.wait(DEADLINE_S) == 0, "a drained replica did not end with 0"
                    num_before = streams.num_done
                    servers[index] = _replica(stack, model, directory / f"log-{port}-again", port)
                    _wait_until_used(servers[index])
                    wait_for(lambda before=num_before: streams.num_done > before + 4, "the load stopped")
            finally:
                is_over.set()
            for client in clients:
                client.result()
        assert not streams.failures, f"{len(streams.failures)} failed: {streams.failures[0]}"
    return (
        f"2 of 2 replicas drained and came back under {NUM_CLIENTS} streams at once: {streams.num_done} whole, 0 failed"
    )


def lost_replica(model: Path, directory: Path, *, router: Path) -> str:
    """Requests with one prefix go to one replica; when one is killed, its streams break and no others."""
    with ExitStack() as stack:
        servers = [_replica(stack, model, directory / f"log-{index}", 0) for index in range(2)]
        url = stack.enter_context(_routing(router, servers, directory, policy="cache_aware"))
        streams = Streams()
        for _ in range(6):
            for prefix in PREFIXES:
                assert streams.ask(url, messages=[{"role": "user", "content": prefix}], max_tokens=4), streams.failures
        hits = sum(server.metric("vllm:prefix_cache_hits_total") for server in servers)
        share = hits / sum(server.metric("vllm:prefix_cache_queries_total") for server in servers)
        # Each prefix is computed once by the replica that it sticks to: five of six prompts are found.
        assert share > 0.7, f"only {share:.0%} of prompt tokens were found in the caches"
        # That policy sends everything to one replica while it has room; for what follows both have to be used.
        url = stack.enter_context(_routing(router, servers, directory, policy="round_robin"))
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(streams.ask, url, max_tokens=250) for _ in range(8)]
            wait_for(lambda: sum(_num_running(server) for server in servers) == 8, "the streams did not begin")
            victim = min((server for server in servers if _num_running(server)), key=_num_running)
            num_on_victim = _num_running(victim)
            victim.child.kill()
            outcomes = [one.result() for one in asked]
        num_whole = sum(outcomes)
        assert num_whole == 8 - num_on_victim, f"{num_whole} of 8 whole, {num_on_victim} were on the killed replica"
        after = Streams()
        for _ in range(5):
            after.ask(url)
        assert not after.failures, after.failures[0]
    return (
        f"{share:.0%} of prompt tokens from the caches; {num_on_victim} of 8 streams were on the killed replica and "
        f"broke, {num_whole} ended whole; 5 of 5 requests afterwards"
    )


def find_router(tools: Path) -> Path:
    """The program.

    Raises:
        RouterMissingError: it is not there.
    """
    program = tools / "bin" / "vllm-router"
    if not program.exists():
        raise RouterMissingError(f"no vllm-router in {tools}; leave --no-install out")
    return program


@contextmanager
def _routing(router: Path, servers: list[Server], directory: Path, *, policy: str) -> Iterator[str]:
    port = _free_port()
    command = [str(router), "--worker-urls", *(server.url for server in servers), "--policy", policy]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())]
    # A replica that drains is not ready, and is asked no more; what it still refuses is tried on the other one.
    command += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "1"]
    command += ["--health-failure-threshold", "1", "--health-success-threshold", "1", "--retry-max-retries", "8"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (directory / f"router-{policy}").open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: _answers(url), "the router did not come up")
            yield url
        finally:
            child.kill()
            child.wait(DEADLINE_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def _replica(stack: ExitStack, model: Path, log: Path, port: int) -> Server:
    flags = ("--served-model-name", "tiny", "--shutdown-timeout-s", "60")
    return stack.enter_context(running(serve_command(model, *flags, port=port), log))


def _wait_until_used(server: Server) -> None:
    wait_for(lambda: server.metric("vllm:request_success_total") > 0, "the router does not use it again")


def _num_running(server: Server) -> int:
    return round(server.metric("vllm:num_requests_running"))


def _stream(url: str, **fields: Any) -> str | None:
    """What was wrong with one stream; None if it came whole."""
    request = body(**({"stream": True, "max_tokens": NUM_TOKENS} | fields))
    last = ""
    try:
        with httpx.stream("POST", url + PATH, json=request, timeout=DEADLINE_S) as response:
            if response.status_code != 200:
                return f"{response.status_code} {response.read()[:200]!r}"
            for line in response.iter_lines():
                if line.startswith("data: {") and '"error"' in line:
                    return line[:200]
                last = line or last
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return None if last == "data: [DONE]" else f"it ended with {last[:100]!r}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
