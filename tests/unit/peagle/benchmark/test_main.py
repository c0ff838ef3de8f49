"""The command as a user runs it: exit code, last line, table, flags."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from peagle.benchmark.__main__ import main
from tests.unit.peagle.benchmark.chat_server import DONE, FINISH, GOOD_STEPS, Answer, ChatServer, chunk, event, usage

SMALL = ["--num-prompts", "4", "--concurrency", "1,2", "--timeout-s", "10"]


async def bench(*words: str) -> int:
    """Run the command beside the servers of this test, with an event loop of its own."""
    return await asyncio.to_thread(main, list(words))


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out = capsys.readouterr().out
    assert out.endswith("}\n")
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


async def test_a_good_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    async with ChatServer() as server:
        assert await bench("--base-url", server.base_url, "--output", str(output), "--api-key", "sk-1", *SMALL) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    assert [level["concurrency"] for level in report["levels"]] == [1, 2]
    for level in report["levels"]:
        assert (level["num_requests"], level["num_failed"]) == (4, 0)
        assert level["completion_tokens"] == 24
        assert level["tokens_per_s"] == 24 / level["wall_s"]
        assert level["tokens_per_chunk"] == 2.0
        assert level["finish_reasons"] == {"stop": 4}
        assert level["server_rates"] is None
    assert report["servers"]["A"]["model"] == "first"
    assert report["comparisons"] == []
    assert report["failures"] == {"total": 0, "by_kind": {}, "examples": []}
    assert report["settings"]["num_distinct_prompts"] == 4
    assert "sk-1" not in captured.out
    assert set(server.authorizations) == {"Bearer sk-1"}
    header, first, second = captured.out.splitlines()[:3]
    assert "TTFT ms p50/p90/p99" in header
    assert first.split()[:4] == ["A", "1", "4", "0"]
    assert second.split()[:4] == ["A", "2", "4", "0"]
    assert "A concurrency 2 round 1/1" in captured.err


async def test_flags_reach_the_body(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    words = ["--dataset", str(dataset), "--num-prompts", "4", "--concurrency", "1", "--max-tokens", "9", "--seed", "5"]
    async with ChatServer() as server:
        extra = ["--model", "mine", "--temperature", "0.5", "--ignore-eos", "--extra-body", '{"top_k": 3}']
        assert await bench("--base-url", server.base_url, *words, *extra) == 0
    measured = server.log[1:]  # the first is the warm-up
    assert {body["messages"][0]["content"] for body in measured} == {"one", "two"}
    assert [body["seed"] for body in measured] == [5, 6, 7, 8]
    expected = {"model": "mine", "max_tokens": 9, "temperature": 0.5, "ignore_eos": True, "top_k": 3}
    assert all(expected.items() <= body.items() for body in measured)
    settings = last_line(capsys)["settings"]
    assert (settings["num_distinct_prompts"], settings["extra_body"], settings["seed"]) == (2, {"top_k": 3}, 5)


async def test_two_servers_are_compared_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    def slow(body: dict[str, Any]) -> Answer:
        text = "Hello wörld" if body["seed"] % 2 else "Something else"
        return Answer(steps=[0.05, chunk(text), FINISH, usage(6), DONE])

    async with ChatServer() as a, ChatServer(slow) as b:
        root = b.base_url.removesuffix("/v1") + "/"
        assert await bench("--base-url", a.base_url, "--compare", root, "--compare-model", "other", *SMALL) == 0
    captured = capsys.readouterr().out
    report = json.loads(captured.splitlines()[-1])
    assert [(level["server"], level["concurrency"]) for level in report["levels"]] == [
        ("A", 1),
        ("B", 1),
        ("A", 2),
        ("B", 2),
    ]
    assert report["servers"]["B"] == {"base_url": b.base_url + "/", "model": "other"}
    assert report["settings"]["num_rounds"] == 2
    for comparison in report["comparisons"]:
        a_level, b_level = (level for level in report["levels"] if level["concurrency"] == comparison["concurrency"])
        assert comparison["tokens_per_s_ratio"] == a_level["tokens_per_s"] / b_level["tokens_per_s"]
        assert comparison["ttft_p50_ratio"] == a_level["ttft_s"]["p50"] / b_level["ttft_s"]["p50"]
        assert len(comparison["tokens_per_s_ratio_by_round"]) == 2
        assert (comparison["num_equal_outputs"], comparison["num_compared_outputs"]) == (4, 8)
    assert "tok/s A/B" in captured
    assert "4 of 8" in captured


async def test_failures_are_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    def moody(body: dict[str, Any]) -> Answer:
        match body["seed"]:
            case 0:
                return Answer(status=503, steps=[b"over\nloaded"])
            case 1:
                return Answer(steps=[chunk("a"), event({"error": {"message": "step failed"}}), DONE])
            case 2:
                return Answer(steps=GOOD_STEPS[:-1])
        return Answer(steps=GOOD_STEPS)

    async with ChatServer(moody) as server:
        assert await bench("--base-url", server.base_url, "--num-prompts", "4", "--concurrency", "1") == 1
    captured = capsys.readouterr().out
    report = json.loads(captured.splitlines()[-1])
    assert report["failures"]["total"] == 4
    assert report["failures"]["by_kind"] == {"http_status": 2, "error_event": 1, "missing_done": 1}
    assert {example["kind"] for example in report["failures"]["examples"]} == {
        "http_status",
        "error_event",
        "missing_done",
    }
    (level,) = report["levels"]
    assert (level["num_failed"], level["num_warm_up_failed"], level["completion_tokens"]) == (3, 1, 6)
    assert "4 failed: http_status 2, error_event 1, missing_done 1; first: 503: over loaded" in captured


async def test_a_server_that_refuses_everything(capsys: pytest.CaptureFixture[str]) -> None:
    async with ChatServer(lambda body: Answer(status=503, steps=[b"x"])) as server:
        assert await bench("--base-url", server.base_url, *SMALL) == 1
    (first, second) = last_line(capsys)["levels"]
    assert first["ttft_s"] is None
    assert second["num_failed"] == 4


async def test_speculation_is_reported_where_the_server_counts_it(capsys: pytest.CaptureFixture[str]) -> None:
    def metrics() -> str:
        asked = len(server.log)
        return (
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {asked * 2}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {asked * 8}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {asked * 3}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {asked * 2}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {asked}\n'
        )

    server = ChatServer(metrics=metrics)
    async with server:
        assert await bench("--base-url", server.base_url, *SMALL) == 0
    for level in last_line(capsys)["levels"]:
        assert level["server_rates"] == {
            "num_drafts": 8,
            "num_draft_tokens": 32,
            "num_accepted_tokens": 12,
            "acceptance_rate": 0.375,
            "mean_acceptance_length": 2.5,
            "acceptance_rate_per_pos": [1.0, 0.5],
            "prefix_cache_hit_rate": None,
        }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "8"], "--num-prompts 8 cannot keep 16"),
        (["--extra-body", '{"stream": false}'], "cannot set stream"),
        (["--dataset", "missing.jsonl"], "cannot read the data set"),
        (["--compare-model", "x"], "need --compare"),
        (["--output", "missing/x.json"], "no directory missing"),
        (["--base-url", "http://127.0.0.1:9"], "is the server up?"),
    ],
)
def test_nothing_can_be_measured(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--concurrency", "4,4"],
        ["--concurrency", "0"],
        ["--concurrency", "1,x"],
        ["--base-url", "ftp://h"],
        ["--base-url", "http://user:secret@h"],
        ["--base-url", "http://h:x"],
        ["--extra-body", "[1]"],
        ["--extra-body", "{"],
        ["--extra-body", '{"a": NaN}'],
        ["--temperature", "nan"],
        ["--timeout-s", "0"],
        ["--repeat", "0"],
        ["--api-k", "x"],
    ],
)
def test_bad_flags_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert words[0] in capsys.readouterr().err
