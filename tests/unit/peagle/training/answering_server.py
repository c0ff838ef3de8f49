"""A real HTTP server with OpenAI's chat API whose replies are the test's choice, good and bad."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One HTTP response. A status of 0 closes the connection instead."""

    status: int = 200
    content: Any = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class AnsweringServer:
    """Answers each chat request with what `reply` makes of its body, and keeps the bodies."""

    reply: Callable[[dict[str, Any]], Reply]
    models: list[str] = field(default_factory=lambda: ["tiny"])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    url: str = ""


def says(text: str, *, finish_reason: str = "stop", num_tokens: int = 3) -> Reply:
    """A whole chat completion."""
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason}]
    return Reply(content={"choices": choices, "usage": {"completion_tokens": num_tokens}})


def refuses(status: int, message: str, **headers: str) -> Reply:
    """An error in OpenAI's form."""
    return Reply(
        status=status,
        content={"error": {"message": message}},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


@contextmanager
def answering_server(reply: Callable[[dict[str, Any]], Reply], **options: Any) -> Iterator[AnsweringServer]:
    """Serve on a free port until the block ends."""
    state = AnsweringServer(reply=reply, **options)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"state": state}))
    state.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: AnsweringServer

    def do_GET(self) -> None:
        self._send(Reply(content={"data": [{"id": name} for name in self.state.models]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.state.bodies.append(body)
        self.state.authorizations.append(self.headers.get("Authorization"))
        self._send(self.state.reply(body))

    def _send(self, reply: Reply) -> None:
        if reply.status == 0:
            self.close_connection = True
            return
        data = json.dumps(reply.content).encode()
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
