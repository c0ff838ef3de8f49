"""`peagle train`: flags reach the steps, results go to stdout, and wrong use is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle.drafter.export import save_flat
from server.cli import main
from tests.builders.head import tiny_head
from tests.builders.model import write_model
from tests.builders.server import live_server
from tests.builders.tokenizer import build_tokenizer_directory
from tests.fakes import ScriptedEngine
from tests.source_tree import ROOT


def write_prompts(directory: Path, num_prompts: int) -> Path:
    path = directory / "prompts.jsonl"
    records = [
        {"id": i, "licence": "MIT" if i % 2 else "GPL", "messages": [{"role": "user", "content": "hi" * (i + 1)}]}
        for i in range(num_prompts)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_regenerate_asks_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, output = write_prompts(tmp_path, 6), tmp_path / "answers.jsonl"
    engine = ScriptedEngine()
    with live_server(engine) as server:
        words = ["train", "regenerate", "--prompts", str(prompts), "--output", str(output), "--base-url", server.url]
        flags = ["--temperature", "0,0.5", "--licences", "MIT", "GPL", "--limit", "4", "--max-tokens", "7"]
        assert main([*words, *flags, "--concurrency", "2", "--model", "acme/tiny", "--api-key", "k"]) == 0
    records = sorted(read(output), key=lambda record: str(record["id"]))
    assert [(record["id"], record["temperature"]) for record in records] == [("0", 0), ("1", 0.5), ("2", 0), ("3", 0.5)]
    assert {request.params.max_tokens for request in engine.requests} == {7}
    captured = capsys.readouterr()
    assert captured.out.startswith("4 of 4 prompts answered (0 before), 0 too long, 0 failed; 20 tokens in ")
    assert "4/4" in captured.err  # the progress bar


def test_regenerate_without_one_answer_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, output = write_prompts(tmp_path, 2), tmp_path / "answers.jsonl"
    with live_server(ScriptedEngine(script=())) as server:
        words = ["train", "regenerate", "--prompts", str(prompts), "--output", str(output), "--base-url", server.url]
        assert main(words) == 1
    assert "2 failed" in capsys.readouterr().out


def test_eval_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_model(tmp_path / "target")
    build_tokenizer_directory(target)
    head = save_flat(tiny_head(dtype=torch.float32), tmp_path / "head")
    prompts, output = write_prompts(tmp_path, 4), tmp_path / "eval.json"
    words = ["train", "eval", "--target", str(target), "--head", str(head), "--data", str(prompts)]
    flags = ["--max-k", "2", "--max-new-tokens", "5", "--held-out", "0.5", "--device", "cpu", "--dtype", "float64"]
    assert main([*words, *flags, "--output", str(output)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "2 answers, 10 tokens, 0 skipped"
    assert [line.split()[0] for line in lines] == ["K=1", "K=2"]
    report = json.loads(output.read_text())
    assert report["num_answer_tokens"] == 10
    assert [entry["num_speculative_tokens"] for entry in report["by_num_speculative_tokens"]] == [1, 2]


def test_export_prints_where_the_head_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_model(tmp_path / "target")
    trained, output = save_flat(tiny_head(dtype=torch.float32), tmp_path / "trained"), tmp_path / "out"
    words = ["train", "export", "--checkpoint", str(trained), "--target", str(target), "--output", str(output)]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert load_file(output / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert main([*words, "--layout", "speculators"]) == 0
    assert json.loads((output / "config.json").read_text())["speculators_model_type"] == "peagle"
    capsys.readouterr()
    assert main([*words, "--leave-out", "embeddings", "lm-head"]) == 2
    assert "embed_tokens.weight cannot be left out: it was trained" in capsys.readouterr().err


def test_plot_draws_a_running_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    metrics, output = tmp_path / "metrics.jsonl", tmp_path / "run.png"
    metrics.write_text('{"step": 1, "num_tokens": 10, "loss": 2.0}\n{"step": 2, "num_tok')
    assert main(["train", "plot", "--metrics", str(metrics), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_bytes().startswith(b"\x89PNG")
    assert main(["train", "plot", "--metrics", str(tmp_path / "none"), "--output", str(output)]) == 2
    assert "no metrics at" in capsys.readouterr().err


def test_run_hands_every_word_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def trainer(words: list[str]) -> int:
        calls.append(words)
        return 5

    module = ModuleType("peagle.training.__main__")
    module.main = trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peagle.training.__main__", module)
    assert main(["train", "run", "--help"]) == 5
    assert main(["train", "run", "--target", "x"]) == 5
    assert calls == [["--help"], ["--target", "x"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "STEP"),
        (["train", "evaluate"], "invalid choice: 'evaluate'"),
        (["train", "regenerate"], "--prompts, --output, --base-url"),
        (["train", "eval", "--targt", "x"], "required: --target"),
        (
            ["train", "regenerate", "--prompts", "p", "--output", "o", "--base-url", "u", "--temperature", "warm"],
            "wanted numbers such as 0,0,0.7; got 'warm'",
        ),
        (
            ["train", "regenerate", "--prompts", "p", "--output", "o", "--base-url", "u", "--temperatur", "1"],
            "did you mean '--temperature'?",
        ),
        (
            ["train", "regenerate", "--prompts", "/no/file", "--output", "o", "--base-url", "http://x"],
            "cannot read /no/file",
        ),
        (
            ["train", "eval", "--target", "t", "--head", "h", "--data", "d", "--output", "/no/where/x.json"],
            "no directory /no/where",
        ),
        (["train", "eval", "--target", "t", "--head", "h", "--data", "d", "--device", "tpu"], "device must be one of"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("peagle: error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "regenerate", "--help"], ["train", "eval", "--help"]])
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    code = f"import sys; sys.modules['torch'] = None\nfrom server.cli import main\nmain({words!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: peagle train" in done.stdout
