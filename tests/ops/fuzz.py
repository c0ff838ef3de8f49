"""Bytes that are no requests, and requests that are no good: the server stays well, and its memory flat."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

import httpx

from tests.ops.process import DEADLINE_S, PATH, Server, body, running, serve_command, wait_for

NUM_MUTATED = 600
NUM_HALF_OPEN = 64
REPLY_S = 0.2
VALUES: tuple[Any, ...] = (None, True, -1, 0, 10**30, 1e308, "", "x" * 5000, "\u0000", [], {}, [[[]]], {"a": {"b": []}})


def wire(model: Path, directory: Path) -> str:
    """Mutated heads and bodies, invalid chunks, huge headers and half-open connections on raw sockets."""
    flags = ("--request-head-timeout-s", "2", "--request-body-timeout-s", "2")
    with running(serve_command(model, *flags), directory / "log") as server:
        server.ask()
        memory, files = server.rss_mb(), server.num_files()
        rng = random.Random(0)
        replies = [_send(server, _mutated(rng)) for _ in range(NUM_MUTATED)]
        half_open = [socket.create_connection(server.address, DEADLINE_S) for _ in range(NUM_HALF_OPEN)]
        for index, client in enumerate(half_open):
            client.sendall(_valid()[: 10 + index])
        assert server.health() == 200
        assert server.ask().status_code == 200  # while they are there
        for client in half_open:
            client.close()
        statuses = {reply.split(b" ")[1] for reply in replies if reply.startswith(b"HTTP/1.1 ")}
        assert b"500" not in statuses, server.text()[-2000:]
        server.becomes_idle()
        wait_for(lambda: server.num_files() <= files + 2, "connections were left open")
        growth = server.rss_mb() - memory
        assert growth < 64, f"{growth:.0f} MB more"
    return f"{NUM_MUTATED} mutated, {NUM_HALF_OPEN} half open: healthy, no 500, memory {growth:+.1f} MB"


def bodies(model: Path, directory: Path) -> str:
    """Every field of a request with values of every kind: an answer or an error in the envelope, never a 500."""
    with running(serve_command(model), directory / "log") as server, httpx.Client(timeout=DEADLINE_S) as client:
        described = client.get(f"{server.url}/openapi.json").json()["paths"][PATH]["post"]["requestBody"]
        schema = described["content"]["application/json"]["schema"]
        counts: dict[int, int] = {}
        for name in schema["properties"]:
            for value in VALUES:
                response = client.post(server.url + PATH, json=body() | {name: value})
                counts[response.status_code] = counts.get(response.status_code, 0) + 1
                assert response.status_code < 500, (name, value, response.text)
                if response.status_code >= 400:
                    assert response.json()["error"].keys() == {"message", "type", "param", "code"}, (name, value)
        server.becomes_idle()
        assert server.health() == 200
    figures = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    return f"{sum(counts.values())} bodies: {figures}"


def _valid() -> bytes:
    content = httpx.Request("POST", "http://x/", json=body(max_tokens=2)).content
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _mutated(rng: random.Random) -> bytes:
    data = bytearray(_valid())
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[place] = rng.randrange(256)
        elif kind == 1:
            del data[place : place + rng.randrange(1, 20)]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.randrange(1, 20))
        elif kind == 3:
            data[place:place] = b"\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"
        else:
            data[place:place] = b"\r\nX: " + b"y" * rng.choice((10, 70_000))
        if not data:
            data = bytearray(b"\r\n")
    return bytes(data)


def _send(server: Server, data: bytes) -> bytes:
    """What comes back at first; a client that is cut off in mid-write is an answer, too."""
    with socket.create_connection(server.address, DEADLINE_S) as client:
        client.settimeout(REPLY_S)
        try:
            client.sendall(data)
            return client.recv(4096)
        except (TimeoutError, ConnectionError):
            return b""
