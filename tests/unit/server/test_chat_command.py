"""`peagle chat` against a small real HTTP server that answers as the API does."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from peagle.errors import ConfigError
from server.chat_client import ChatClient, ChatError
from server.cli import main
from server.commands.chat import Chat, choose_model

Answer = Callable[["Handler"], None]


@dataclass
class ChatServer:
    """Answers each chat request by the next of `answers`, and keeps the bodies it was sent."""

    answers: list[Answer]
    models: list[str] = field(default_factory=lambda: ["tiny"])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    client_gone: threading.Event = field(default_factory=threading.Event)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    """One connection; `chat` is set by the fixture's subclass."""

    chat: ChatServer

    def do_GET(self) -> None:
        self.send_json(200, {"object": "list", "data": [{"id": name} for name in self.chat.models]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.chat.bodies.append(json.loads(body))
        self.chat.answers.pop(0)(self)

    def send_json(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def start_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def send_event(self, event: Any) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def content(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def says(*pieces: str) -> Answer:
    """A whole answer: role chunk, a keep-alive comment, the pieces, usage, `[DONE]`."""

    def answer(handler: Handler) -> None:
        handler.start_events()
        handler.send_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        handler.wfile.write(b": keep-alive\n\n")
        for piece in pieces:
            handler.send_event(content(piece))
        handler.send_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        handler.send_event({"choices": [], "usage": {"completion_tokens": 3}})
        handler.send_event("[DONE]")

    return answer


@pytest.fixture
def server() -> Iterator[ChatServer]:
    chat = ChatServer(answers=[])
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"chat": chat}))
    chat.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield chat
    http.shutdown()
    http.server_close()
    thread.join()


def talk(server: ChatServer, *lines: str, stdout: io.StringIO | None = None, **options: Any) -> str:
    """Type `lines` into a chat; returns what the terminal shows."""
    stdout = stdout or io.StringIO()
    with ChatClient(server.url) as client:
        chat = Chat(client=client, model="tiny", **options)
        assert chat.talk(stdin=io.StringIO("".join(line + "\n" for line in lines)), stdout=stdout) == 0
    return stdout.getvalue()


def sent_messages(server: ChatServer) -> list[list[tuple[str, str]]]:
    return [[(message["role"], message["content"]) for message in body["messages"]] for body in server.bodies]


def test_answers_stream_and_the_history_is_sent(server: ChatServer) -> None:
    server.answers = [says("Hel", "lo ☃"), says("Bye")]
    shown = talk(server, "Hi", "And?", system="Be kind.", sampling={"temperature": 0.0, "max_tokens": 9})
    assert "> Hello ☃\n> Bye\n> " in shown
    assert sent_messages(server) == [
        [("system", "Be kind."), ("user", "Hi")],
        [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello ☃"), ("user", "And?")],
    ]
    assert {name: server.bodies[0][name] for name in ("model", "stream", "temperature", "max_tokens")} == {
        "model": "tiny",
        "stream": True,
        "temperature": 0.0,
        "max_tokens": 9,
    }


def test_without_a_system_message_none_is_sent(server: ChatServer) -> None:
    server.answers = [says("a")]
    talk(server, "Hi")
    assert sent_messages(server) == [[("user", "Hi")]]


def test_clear_forgets_and_exit_leaves(server: ChatServer) -> None:
    server.answers = [says("a"), says("b"), says("never")]
    shown = talk(server, "one", "/clear", "", "  ", "two", "/exit", "three")
    assert sent_messages(server) == [[("user", "one")], [("user", "two")]]
    assert shown.endswith("b\n> ")


def test_an_unknown_command_is_explained_and_not_sent(server: ChatServer) -> None:
    shown = talk(server, "/help me")
    assert "No command /help: /clear forgets" in shown
    assert server.bodies == []


def test_ctrl_c_stops_the_answer_and_not_the_program(server: ChatServer) -> None:
    stdout = io.StringIO()

    def endless(handler: Handler) -> None:
        handler.start_events()
        handler.send_event(content("Once upon"))
        deadline = time.monotonic() + 10
        while "Once upon" not in stdout.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)  # the terminal is back to waiting for the next piece
        os.kill(os.getpid(), signal.SIGINT)
        if handler.connection.recv(1) == b"":
            server.client_gone.set()

    server.answers = [endless, says("Fine.")]
    shown = talk(server, "Tell me a story", "Go on", stdout=stdout)
    assert "Once upon [stopped]\n> Fine.\n" in shown
    assert sent_messages(server)[1] == [
        ("user", "Tell me a story"),
        ("assistant", "Once upon"),
        ("user", "Go on"),
    ]
    assert server.client_gone.wait(10), "a stopped answer must close its connection, or the server goes on generating"


def test_a_refused_question_is_explained_and_forgotten(server: ChatServer) -> None:
    def refuse(handler: Handler) -> None:
        handler.send_json(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})

    server.answers = [refuse, says("ok")]
    shown = talk(server, "long", "short")
    assert "the server refuses (400): too long" in shown
    assert sent_messages(server)[1] == [("user", "short")]


def test_an_error_within_the_stream_is_shown(server: ChatServer) -> None:
    def fail(handler: Handler) -> None:
        handler.start_events()
        handler.send_event(content("Well"))
        handler.send_event({"error": {"message": "the step failed"}})

    server.answers = [fail, says("ok")]
    shown = talk(server, "a", "b")
    assert "Wellthe server reports: the step failed\n> ok" in shown
    assert sent_messages(server)[1] == [("user", "b")]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([content("cut")], "broke the answer off"),
        (["{not json"], "not JSON: '{not json'"),
    ],
)
def test_a_broken_stream_is_named(server: ChatServer, events: list[Any], message: str) -> None:
    def broken(handler: Handler) -> None:
        handler.start_events()
        for event in events:
            handler.send_event(event)

    server.answers = [broken]
    assert message in talk(server, "a")


def test_half_a_character_from_the_terminal_does_no_harm(server: ChatServer) -> None:
    server.answers = [says("ok")]
    talk(server, "caf\udcc3")
    assert sent_messages(server) == [[("user", "caf?")]]


def test_the_first_model_is_taken_unless_one_is_named(server: ChatServer) -> None:
    server.models = ["a", "b"]
    with ChatClient(server.url) as client:
        assert choose_model(client, None) == "a"
        assert choose_model(client, "b") == "b"
        with pytest.raises(ConfigError, match="no model 'c'; it serves a, b"):
            choose_model(client, "c")
        server.models = []
        with pytest.raises(ChatError, match="serves no model yet"):
            choose_model(client, None)


def test_the_command_talks_on_the_terminal(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [says("Hello")]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert main(["chat", "--url", server.url + "/", "--temperature", "0", "--seed", "3"]) == 0
    assert "> Hello\n" in capsys.readouterr().out
    assert (server.bodies[0]["temperature"], server.bodies[0]["seed"]) == (0.0, 3)
    assert "top_p" not in server.bodies[0]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9/v1", "no server answers at http://127.0.0.1:9/v1; start one with `peagle serve`"),
        ("localhost:8000", "not a server's address: 'localhost:8000'"),
    ],
)
def test_without_a_server_the_error_says_what_to_do(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url]) == 1
    assert message in capsys.readouterr().err


def test_another_kind_of_server_is_recognised(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.send_json(200, ["hello"]))
    with ChatClient(server.url) as client, pytest.raises(ChatError, match="does not answer as an OpenAI server"):
        client.model_names()
