"""Regenerating answers, against real HTTP servers: ours around a scripted engine, and one that misbehaves."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.errors import ConfigError
from peagle.training.chat_endpoint import EndpointError, RetryPolicy
from peagle.training.regenerate import RegenerateConfig, RegenerateReport, failures_path, regenerate
from tests.builders.server import live_server
from tests.fakes import Say, ScriptedEngine
from tests.unit.peagle.training.answering_server import Reply, answering_server, refuses, says

QUICK = RetryPolicy(num_tries=2, first_wait_s=0.0)


def write_prompts(directory: Path, texts: list[str]) -> Path:
    path = directory / "prompts.jsonl"
    lines = [
        json.dumps({"id": f"p{i}", "source": "mine", "messages": [{"role": "user", "content": text}]})
        for i, text in enumerate(texts)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(directory: Path, url: str, **options: Any) -> RegenerateReport:
    config = RegenerateConfig(
        prompts=directory / "prompts.jsonl", output=directory / "answers.jsonl", base_url=url, **options
    )
    return regenerate(config, retry=QUICK)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def echo(body: dict[str, Any]) -> Reply:
    return says("about " + body["messages"][-1]["content"])


def test_our_server_answers(tmp_path: Path) -> None:
    write_prompts(tmp_path, ["one", "two", "x" * 600, "four"])
    engine = ScriptedEngine(script=(Say("Hel"), Say("lo", num_tokens=2)))
    with live_server(engine) as server:
        report = run(tmp_path, server.url, max_tokens=8, temperatures=(0.0, 0.7))
    assert sorted(read(tmp_path / "answers.jsonl"), key=lambda record: record["id"]) == [
        {
            "id": f"p{i}",
            "source": "mine",
            "temperature": temperature,
            "finish_reason": "stop",
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Hello"}],
        }
        for i, text, temperature in [(0, "one", 0.0), (1, "two", 0.7), (3, "four", 0.7)]
    ]
    assert (report.num_answered, report.num_too_long, report.num_failed, report.num_tokens) == (3, 1, 0, 9)
    (failure,) = read(failures_path(tmp_path / "answers.jsonl"))
    assert (failure["id"], failure["reason"]) == ("p2", "too_long")
    seeds = {request.params.temperature: request.params.seed for request in engine.requests}
    assert seeds.keys() == {0.0, 0.7}
    assert {request.params.max_tokens for request in engine.requests} == {8}


def test_a_run_goes_on_where_the_last_one_was_killed(tmp_path: Path) -> None:
    write_prompts(tmp_path, ["zero", "one", "two", "three"])
    output = tmp_path / "answers.jsonl"
    with answering_server(echo) as server:
        run(tmp_path, server.url, limit=2, concurrency=1)
        first, second = output.read_bytes().splitlines(keepends=True)
        output.write_bytes(first + second[:-20])
        server.bodies.clear()
        report = run(tmp_path, server.url, concurrency=1)
        assert [body["messages"][-1]["content"] for body in server.bodies] == ["one", "two", "three"]
    assert output.read_bytes().startswith(first + second)
    assert [record["id"] for record in read(output)] == ["p0", "p1", "p2", "p3"]
    assert (report.num_already, report.num_answered) == (1, 3)
    assert report.summary().startswith("3 of 4 prompts answered (1 before), 0 too long, 0 failed; 9 tokens in")


def test_nothing_left_to_do_needs_no_server(tmp_path: Path) -> None:
    write_prompts(tmp_path, ["zero"])
    with answering_server(echo) as server:
        run(tmp_path, server.url)
    assert run(tmp_path, "http://127.0.0.1:9").num_already == 1


def test_failing_prompts_do_not_stop_the_run_and_are_asked_again(tmp_path: Path) -> None:
    write_prompts(tmp_path, ["good", "bad", "fine", "broken"])

    def reply(body: dict[str, Any]) -> Reply:
        text = body["messages"][-1]["content"]
        return {"bad": refuses(500, "no"), "broken": Reply(status=0)}.get(text) or echo(body)

    with answering_server(reply) as server:
        report = run(tmp_path, server.url)
        assert (report.num_answered, report.num_failed) == (2, 2)
        failures = {entry["id"]: entry["reason"] for entry in read(failures_path(tmp_path / "answers.jsonl"))}
        assert failures == {"p1": "refused", "p3": "broken"}
        server.reply = echo
        assert run(tmp_path, server.url).num_answered == 2
    assert not failures_path(tmp_path / "answers.jsonl").exists()


def test_ctrl_c_keeps_what_is_answered(tmp_path: Path) -> None:
    write_prompts(tmp_path, ["one", "two", "three"])
    released = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["content"] == "two":
            os.kill(os.getpid(), signal.SIGINT)
            released.wait(20)
        return echo(body)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    try:
        with answering_server(reply) as server:
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, server.url, concurrency=1)
            released.set()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [record["id"] for record in read(tmp_path / "answers.jsonl")] == ["p0"]
    assert not failures_path(tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_prompts_are_under_way(tmp_path: Path, concurrency: int) -> None:
    write_prompts(tmp_path, ["a"] * 6)
    barrier = threading.Barrier(concurrency)  # each reply waits until so many requests are there

    def reply(body: dict[str, Any]) -> Reply:
        barrier.wait(20)
        return echo(body)

    with answering_server(reply) as server:
        assert run(tmp_path, server.url, concurrency=concurrency).num_answered == 6


def test_a_server_that_goes_away_ends_the_run_and_keeps_the_answers(tmp_path: Path) -> None:
    write_prompts(tmp_path, ["a", "b"])
    with answering_server(echo) as server:
        run(tmp_path, server.url, limit=1)
        url = server.url
    with pytest.raises(EndpointError, match="is the server up"):
        run(tmp_path, url)
    assert [record["id"] for record in read(tmp_path / "answers.jsonl")] == ["p0"]


def test_the_wrong_output_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    write_prompts(tmp_path, ["a"])
    (tmp_path / "answers.jsonl").write_text("notes\n")
    with answering_server(echo) as server:
        with pytest.raises(ConfigError, match="give --output another file"):
            run(tmp_path, server.url)
        assert server.bodies == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"temperatures": ()}, "temperatures must be"),
        ({"temperatures": (0.0, -1.0)}, "temperatures must be"),
        ({"output": Path("/nowhere/answers.jsonl")}, "no directory /nowhere"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    make: Callable[..., RegenerateConfig] = RegenerateConfig
    with pytest.raises(ConfigError, match=message):
        make(**({"prompts": tmp_path, "output": tmp_path / "x", "base_url": "http://x"} | options))
