"""The load test: what it takes for a whole answer, what it measures, and when its exit code says no."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from peagle.errors import EngineOverloadedError
from tests.builders.server import live_server
from tests.deploy.tools import find_tool, run
from tests.fakes import Say, ScriptedEngine
from tests.source_tree import ROOT

LOADTEST = ROOT / "loadtest"


@pytest.fixture(scope="module")
def chat_stream() -> ModuleType:
    """The module as Locust imports it: a file beside the locustfile, in no package."""
    spec = importlib.util.spec_from_file_location("chat_stream", LOADTEST / "chat_stream.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], **fields}).encode()


def text(content: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"delta": {"content": content}, "finish_reason": finish_reason}])


END = event(choices=[{"delta": {}, "finish_reason": "stop"}])
USAGE = event(usage={"completion_tokens": 7})
DONE = b"data: [DONE]"


def clock(*times: float) -> Callable[[], float]:
    values: Iterator[float] = iter(times)
    return lambda: next(values)


def test_times_are_per_chunk_and_per_token(chat_stream: ModuleType) -> None:
    lines = [b": keep-alive", b"", text("a"), text("bc"), text("d"), END, USAGE, DONE]
    answer = chat_stream.measure(lines, started_at=10.0, clock=clock(10.5, 10.75, 11.25))
    assert (answer.text, answer.finish_reason, answer.num_tokens) == ("abcd", "stop", 7)
    assert (answer.first_token_s, answer.last_token_s, answer.gaps_s) == (0.5, 1.25, (0.25, 0.5))
    assert answer.time_per_token_s == 0.125
    assert answer.tokens_per_chunk == 7 / 3


def test_one_token_has_no_time_per_token(chat_stream: ModuleType) -> None:
    lines = [text("a", "length"), event(usage={"completion_tokens": 1}), DONE]
    assert chat_stream.measure(lines, started_at=0.0).time_per_token_s is None


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([text("a"), END, USAGE], r"without \[DONE\]"),
        ([text("a"), USAGE, DONE], "without finish_reason"),
        ([text("a"), END, DONE], "without usage"),
        ([END, USAGE, DONE], "without text"),
        ([text("a"), event(error={"message": "the engine has stopped"}), DONE], "the engine has stopped"),
    ],
)
def test_a_broken_stream_is_no_answer(chat_stream: ModuleType, lines: list[bytes], problem: str) -> None:
    with pytest.raises(chat_stream.BrokenStreamError, match=problem):
        chat_stream.measure(lines, started_at=0.0)


def locust(url: str, *flags: str, directory: Path) -> Any:
    command: list[str | Path] = [find_tool("locust"), "-f", LOADTEST / "locustfile.py", "--headless", "--host", url]
    command += ["-u", "2", "-r", "2", "-t", "2s", "--stop-timeout", "20", "--only-summary", *flags]
    return run(*command, cwd=directory)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--arrival", "poisson", "--rate", "5"],
        ["--abort-share", "0.5"],
        ["--limit-first-token-ms", "60000", "--limit-per-token-ms", "60000"],
    ],
    ids=["closed", "poisson", "aborts", "limits"],
)
def test_a_good_server_passes(tmp_path: Path, flags: list[str]) -> None:
    script = [Say("a", delay_s=0.02), Say("b", num_tokens=3, delay_s=0.02), Say("c", delay_s=0.02)]
    engine = ScriptedEngine(script=script)
    with live_server(engine) as server:
        done = locust(server.url, *flags, directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert engine.requests


def test_two_equal_servers_compare_equal(tmp_path: Path) -> None:
    with live_server(ScriptedEngine()) as server, live_server(ScriptedEngine()) as other:
        done = locust(server.url, "--compare-with", other.url, directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_different_answers_fail(tmp_path: Path) -> None:
    with live_server(ScriptedEngine()) as server, live_server(ScriptedEngine(script=[Say("Bye")])) as other:
        done = locust(server.url, "--compare-with", other.url, directory=tmp_path)
    assert done.returncode == 1
    assert "answers differ" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("engine", "flags", "complaint"),
    [
        (ScriptedEngine(script=[Say("a", delay_s=0.05)]), ["--limit-first-token-ms", "1"], "first token"),
        (ScriptedEngine(failure=RuntimeError("boom")), [], "failures"),
        (ScriptedEngine(refusal=EngineOverloadedError("full")), [], "were refused"),
    ],
    ids=["slow", "broken", "full"],
)
def test_a_bad_server_fails(tmp_path: Path, engine: ScriptedEngine, flags: list[str], complaint: str) -> None:
    with live_server(engine) as server:
        done = locust(server.url, *flags, directory=tmp_path)
    assert done.returncode == 1
    assert complaint in done.stdout + done.stderr
