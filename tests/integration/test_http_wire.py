"""Bytes that few clients send, on a real socket: what can't be read is refused in words, and the connection closed."""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from server.head_meter import MAX_HEAD_BYTES, MAX_HEADERS
from tests.builders.server import DEADLINE_S, LiveServer, chat_body, eventually_sync, live_server
from tests.fakes import Say, ScriptedEngine
from tests.integration.test_server_process import server_process

POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
ENDLESS = [Say("x", delay_s=0.005, forever=True)]
SILENT = [Say("late", delay_s=3600.0)]


@dataclass(frozen=True, slots=True)
class Reply:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def assert_refusal(self, status: int, code: str) -> None:
        """In OpenAI's envelope, as the last word on its connection."""
        assert self.status == status, self.body
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error" if status < 500 else "server_error", code)
        assert error["message"]
        assert self.headers["content-type"] == "application/json"
        assert self.headers["connection"] == "close"
        assert self.headers["x-request-id"]


def replies_of(wire: bytes) -> list[Reply]:
    """Responses one after another; one without a length, which is not chunked either, goes on to the end."""
    replies = []
    while wire:
        head, _, wire = wire.partition(b"\r\n\r\n")
        status_line, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        status = int(status_line.split()[1])
        body = b""
        if status != 100:
            assert "transfer-encoding" not in headers
            length = int(headers.get("content-length", len(wire)))
            assert len(wire) >= length
            body, wire = wire[:length], wire[length:]
        replies.append(Reply(status, headers, body))
    return replies


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port), timeout=DEADLINE_S)


def rest_of(connection: socket.socket) -> bytes:
    """All until the server closes, which it has to do itself."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def exchange(server: LiveServer, wire: bytes) -> list[Reply]:
    """Send, and read until the server closes the connection."""
    with closing(connect(server.url)) as connection:
        connection.sendall(wire)
        return replies_of(rest_of(connection))


def post(*, body: bytes | None = None, extra: bytes = b"", **fields: Any) -> bytes:
    content = json.dumps(chat_body(**fields)).encode() if body is None else body
    return POST + extra + f"content-length: {len(content)}\r\n\r\n".encode() + content


LAST_POST = post(extra=b"connection: close\r\n")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine()) as live:
        yield live


# ---- pipelines


@pytest.mark.parametrize(("script", "stream"), [(ENDLESS, True), (SILENT, True), (SILENT, False)])
@pytest.mark.parametrize("num_queued", [1, 3])
def test_a_gone_client_with_queued_requests_is_aborted(script: list[Say], stream: bool, num_queued: int) -> None:
    engine = ScriptedEngine(script=script)
    with live_server(engine) as live:
        with closing(connect(live.url)) as connection:
            connection.sendall(post(stream=stream))
            eventually_sync(lambda: engine.num_open == 1)
            connection.sendall(post(stream=stream) * num_queued)
        eventually_sync(lambda: engine.num_open == 0)
        assert len(engine.ended_early) == 1
        assert len(engine.requests) == 1  # the queued ones were never begun
        assert httpx.get(f"{live.url}/health", timeout=DEADLINE_S).status_code == 200


def test_queued_requests_are_answered_in_order(server: LiveServer) -> None:
    first, second, third = exchange(server, post() + HEALTH + LAST_POST)
    assert json.loads(first.body)["object"] == json.loads(third.body)["object"] == "chat.completion"
    assert second.body == b"{}"
    assert len(exchange(server, HEALTH * 30 + LAST_POST)) == 31


def test_what_follows_a_good_request_does_not_harm_it(server: LiveServer) -> None:
    for junk in (b"\0\1\2\r\n\r\n", POST + b"transfer-encoding: chunked\r\n\r\nno number\r\n"):
        (reply,) = exchange(server, post() + junk)
        assert json.loads(reply.body)["choices"][0]["message"]["content"] == "Hello world"


# ---- what is no request


@pytest.mark.parametrize(
    "wire",
    [
        b"\x16\x03\x01\x00\xff" * 100,
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\nhost: a\n\n",
        b"GET http:// HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        POST + b"content-length: +5\r\n\r\nhello",
        POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: identity\r\n\r\n",
        POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_and_nothing_after_it_is_read(server: LiveServer, wire: bytes) -> None:
    (reply,) = exchange(server, wire + HEALTH)
    reply.assert_refusal(400, "malformed_http")
    assert b"callback" not in reply.body


def test_a_body_that_breaks_off_in_mid_chunk_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    with live_server(engine) as live, closing(connect(live.url)) as connection, caplog.at_level(logging.INFO):
        connection.sendall(POST + b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # the app waits for the body
        connection.sendall(b"3\r\nabc\r\nnonsense\r\n")
        (reply,) = replies_of(rest_of(connection))
        reply.assert_refusal(400, "malformed_http")
        eventually_sync(lambda: " 499 " in caplog.text)
    assert engine.requests == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# ---- the head's limits


@pytest.mark.parametrize(
    "wire",
    [
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"GET /health HTTP/1.1\r\na: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\na: " + b"x" * 2_000_000,
        b"GET /" + b"x" * 2_000_000,
        b"\r\n" * 1_000_000,
        POST + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 1_000,
        POST + b"transfer-encoding: chunked\r\n\r\n0\r\na: " + b"x" * 2_000_000,
        POST + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 2_000_000,
    ],
)
def test_a_head_without_measure_is_refused(server: LiveServer, wire: bytes) -> None:
    (reply,) = exchange(server, wire)
    reply.assert_refusal(431, "headers_too_large")


def test_the_largest_head_is_read(server: LiveServer) -> None:
    many = b"a: b\r\n" * (MAX_HEADERS - 1) + b"connection: close\r\n\r\n"
    long = b"connection: close\r\na: " + b"x" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n"
    for fields in (many, long):
        (reply,) = exchange(server, b"GET /health HTTP/1.1\r\n" + fields)
        assert (reply.status, reply.body) == (200, b"{}")


def test_the_fields_of_one_request_do_not_count_for_the_next(server: LiveServer) -> None:
    request = b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS - 1) + b"\r\n"
    assert [reply.status for reply in exchange(server, request * 5 + LAST_POST)] == [200] * 6


# ---- the clock


@pytest.mark.parametrize("wire", [b"", b"\r\n", b"GET", POST, POST + b"content-le"])
def test_a_head_that_never_ends_is_given_up(wire: bytes) -> None:
    with live_server(ScriptedEngine(), request_head_timeout_s=0.5) as live:
        (reply,) = exchange(live, wire)
        reply.assert_refusal(408, "request_timeout")
        with closing(connect(live.url)) as connection:
            connection.sendall(post())
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.sendall(b"GET")  # of a second request, on the same connection
            assert b"HTTP/1.1 408" in rest_of(connection)


@pytest.mark.parametrize("first", [post(), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_half_a_head_behind_a_request_is_given_up_too(first: bytes) -> None:
    with live_server(ScriptedEngine(), request_head_timeout_s=0.5) as live:
        answer, refusal = exchange(live, first + b"POST /v1/chat")
        assert answer.status == 200
        refusal.assert_refusal(408, "request_timeout")


def test_a_long_answer_is_not_a_late_head() -> None:
    engine = ScriptedEngine(script=[Say("x", delay_s=0.3)] * 5)
    with live_server(engine, request_head_timeout_s=0.5, request_body_timeout_s=0.5) as live:
        (reply,) = exchange(live, LAST_POST)
    assert json.loads(reply.body)["choices"][0]["message"]["content"] == "xxxxx"


@pytest.mark.parametrize("framing", [b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_a_body_that_stops_is_given_up(framing: bytes) -> None:
    engine = ScriptedEngine()
    with live_server(engine, request_body_timeout_s=0.2) as live:
        (reply,) = exchange(live, POST + framing)
        reply.assert_refusal(408, "request_timeout")
    assert engine.requests == []


def test_a_half_sent_body_does_not_hold_up_the_end() -> None:
    with server_process("slow") as process:
        eventually_sync(lambda: process.ready_status() == 200)
        with closing(connect(process.url)) as connection:
            connection.sendall(POST + b"content-length: 100\r\nexpect: 100-continue\r\n\r\n{")
            assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # the app waits for the body
            process.child.send_signal(signal.SIGTERM)
            (reply,) = replies_of(rest_of(connection))
            reply.assert_refusal(503, "server_shutting_down")
        assert process.wait() == 0
    assert "ERROR" not in process.log()
    assert "Traceback" not in process.log()


# ---- bodies


@pytest.mark.parametrize("encoding", [b"gzip", b"identity, br", b"Identity\r\ncontent-encoding: deflate"])
def test_a_compressed_body_is_refused(server: LiveServer, encoding: bytes) -> None:
    (reply,) = exchange(server, post(extra=b"connection: close\r\ncontent-encoding: " + encoding + b"\r\n"))
    reply.assert_refusal(415, "unsupported_media_type")


def test_an_encoding_that_does_nothing_is_served(server: LiveServer) -> None:
    (reply,) = exchange(server, post(extra=b"connection: close\r\ncontent-encoding: Identity\r\n"))
    assert reply.status == 200


@pytest.mark.parametrize("framing", [b"content-length: 10000000", b"transfer-encoding: chunked"])
def test_the_rest_of_a_body_that_is_too_long_is_no_request(framing: bytes) -> None:
    chunk = HEALTH * 1000
    wire = chunk if framing.startswith(b"content") else b"%x\r\n%s\r\n" % (len(chunk), chunk)
    with live_server(ScriptedEngine(), max_body_bytes=1024) as live:
        (reply,) = exchange(live, POST + framing + b"\r\n\r\n" + wire)
        reply.assert_refusal(413, "request_too_large")


@pytest.mark.parametrize(
    ("path", "num_bytes", "status"), [(b"/nothing", 4_000_000, 404), (b"/v1/chat/completions", 20_000_000, 413)]
)
def test_a_client_that_writes_it_all_before_it_reads_still_gets_the_reply(
    server: LiveServer, path: bytes, num_bytes: int, status: int
) -> None:
    wire = POST.replace(b"/v1/chat/completions", path) + b"content-length: %d\r\n\r\n" % num_bytes + b"x" * num_bytes
    for _ in range(5):
        (reply,) = exchange(server, wire + HEALTH)
        assert reply.status == status
        assert reply.headers["connection"] == "close"


def test_a_client_that_asks_before_it_sends_its_body(server: LiveServer) -> None:
    body = json.dumps(chat_body()).encode()
    expect = b"connection: close\r\nexpect: 100-continue\r\n"
    with closing(connect(server.url)) as connection:
        connection.sendall(POST + expect + b"content-length: %d\r\n\r\n" % len(body))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        (reply,) = replies_of(rest_of(connection))
        assert reply.status == 200
    (refusal,) = exchange(server, POST + expect + b"content-length: 10000000\r\n\r\n")
    refusal.assert_refusal(413, "request_too_large")


# ---- other versions


def test_an_http_1_0_stream_with_comments_between_its_chunks() -> None:
    engine = ScriptedEngine(script=[*[Say("x" * 10_000)] * 500, Say("y", delay_s=0.2), Say("z", delay_s=0.2)])
    with live_server(engine, keep_alive_s=0.01) as live, closing(connect(live.url)) as connection:
        connection.sendall(post(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
        eventually_sync(lambda: engine.num_open == 1)
        time.sleep(0.2)  # until nothing more fits between us: a chunk and a comment wait together
        (reply,) = replies_of(rest_of(connection))
    assert reply.body.count(b"xxxxxxxxxx") == 500_000
    assert b": keep-alive\n\n" in reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(server: LiveServer, stream: bool) -> None:
    (reply,) = exchange(server, post(stream=stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert reply.status == 200
    assert reply.headers["connection"] == "close"
    assert ("content-length" in reply.headers) == (not stream)
    if stream:
        assert reply.body.startswith(b"data: {")
        assert reply.body.endswith(b"data: [DONE]\n\n")


def test_a_client_of_http_1_0_is_not_told_to_continue(server: LiveServer) -> None:
    (reply,) = exchange(server, post(extra=b"expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert reply.status == 200


def test_a_client_that_would_like_http_2_gets_http_1_1(server: LiveServer) -> None:
    extra = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    upgrading = post(extra=extra)
    first, second, third = exchange(server, upgrading + HEALTH + LAST_POST)
    assert json.loads(first.body)["choices"][0]["message"]["content"] == "Hello world"
    assert second.body == b"{}"
    assert third.status == 200
    with closing(connect(server.url)) as connection:
        for start in range(len(upgrading)):
            connection.sendall(upgrading[start : start + 1])
        assert connection.recv(12) == b"HTTP/1.1 200"
