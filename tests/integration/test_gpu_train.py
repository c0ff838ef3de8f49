"""`scripts/gpu_train`: the whole recipe, from prompts to a head that serves, with a tiny target on the CPU."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peagle.drafter.head_config import TargetShape
from peagle.drafter.loader import load_head
from peagle.training.publish import read_target_tables
from tests.builders.model import write_model
from tests.builders.tokenizer import build_tokenizer_directory
from tests.source_tree import ROOT

VOCAB_SIZE = 300


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = write_model(tmp_path / "target", dtype=torch.float32, vocab_size=VOCAB_SIZE)
    return build_tokenizer_directory(directory)


def run_script(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_train"), *words]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment.pop("OUT", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)


def test_the_recipe_makes_a_head(tmp_path: Path, target: Path) -> None:
    pytest.importorskip("matplotlib")
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text(
        "".join(
            json.dumps({"id": f"p{i}", "messages": [{"role": "user", "content": "hello " * (i % 5 + 1)}]}) + "\n"
            for i in range(30)
        )
    )
    trainer = ["--draft-vocab-size", "100", "--mask-token-id", str(VOCAB_SIZE - 1), "--taps", "1,2,3"]
    paths = ["--target", str(target), "--prompts", str(prompts), "--output", str(output)]
    done = run_script("--small", *paths, "--", *trainer)
    assert done.returncode == 0, done.stderr
    names = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert names >= {"answers.jsonl", "eval.json", "metrics.jsonl", "metrics.png", "provenance.json"}
    assert json.loads((output / "eval.json").read_text())["num_answers"] == 2
    head = load_head(
        output / "head",
        target=TargetShape(num_layers=4, hidden_size=32, vocab_size=VOCAB_SIZE),
        shared=read_target_tables(target),
    )
    assert (head.config.draft_vocab_size, head.config.num_hidden_layers) == (100, 1)


def test_without_a_place_for_the_head_nothing_starts(target: Path) -> None:
    done = run_script("--target", str(target), "--prompts", "none.jsonl")
    assert done.returncode == 2
    assert "give --output, or set OUT" in done.stderr


def test_large_files_are_cut_into_parts_that_join_again(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "large").write_bytes(content)
    (tmp_path / "small").write_bytes(b"x" * 1000)
    split_files = runpy.run_path(str(ROOT / "scripts" / "gpu_train"))["split_files"]
    split_files(tmp_path, 1000)
    parts = sorted((tmp_path / "head").iterdir())
    assert [path.name for path in parts] == ["large.part-0", "large.part-1", "large.part-2"]
    assert b"".join(path.read_bytes() for path in parts) == content
    assert (tmp_path / "small").read_bytes() == b"x" * 1000
