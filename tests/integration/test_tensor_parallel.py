"""A model split between two processes answers as a whole one does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from peagle import SpecConfig, load_engine
from peagle.errors import ConfigError
from tests.builders.engine import engine_config, write_checkpoint
from tests.builders.trained_head import TrainedPair
from tests.integration import rank_process
from tests.source_tree import ROOT

_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"num_speculative_tokens": 0}, id="plain"),
        pytest.param({"num_speculative_tokens": 5, "adaptive_verification": False}, id="chain"),
        pytest.param({"parallel_drafting_spec": {"num_branches": 2, "depth": 3}}, id="tree"),
    ],
)
def test_two_processes_answer_like_one(pair: TrainedPair, spec: dict[str, Any], tmp_path: Path) -> None:
    if spec.get("num_speculative_tokens") != 0:
        spec = {"model": str(pair.head)} | spec
    output = tmp_path / "answers.json"
    command = [*_TORCHRUN, rank_process.__file__, str(pair.target), json.dumps(spec), str(output)]
    done = subprocess.run(command, cwd=ROOT, env=_ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    split = json.loads(output.read_text())
    whole = rank_process.answer(load_engine(engine_config(pair.target, spec=SpecConfig.from_mapping(spec))).engine)
    assert {name: found["token_ids"] for name, found in split.items()} == {
        name: found["token_ids"] for name, found in whole.items()
    }
    for name, found in whole.items():
        assert split[name]["logprobs"] == pytest.approx(found["logprobs"], abs=1e-10)
        assert split[name]["accepted"] == found["accepted"]


def test_a_server_of_two_processes_answers_and_ends(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    with _split_server(directory, tmp_path / "log.txt") as (url, child):
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
        assert answers[0]["usage"]["completion_tokens"] == 8
        assert answers[0]["choices"] == answers[1]["choices"]
        assert httpx.get(f"{url}/health").status_code == 200
        child.terminate()
        child.wait(60)
        assert "Rank 1 ends" in (tmp_path / "log.txt").read_text()


def test_without_torchrun_the_command_is_named(pair: TrainedPair) -> None:
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2 --no-python peagle serve"):
        load_engine(engine_config(pair.target, tensor_parallel_size=2))


@contextmanager
def _split_server(directory: Path, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    flags = ["--model", str(directory), "--served-model-name", "tiny", "--port", "0", "--max-model-len", "64"]
    command = [*_TORCHRUN, "-m", "server.cli", "serve", *flags, "--tensor-parallel-size", "2", "--num-threads", "1"]
    with log.open("wb") as sink:
        child = subprocess.Popen(command, cwd=ROOT, env=_ENVIRONMENT, stdout=sink, stderr=sink)
    try:
        yield _when_ready(child, log), child
    finally:
        child.terminate()
        child.wait(60)


def _when_ready(child: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        assert child.poll() is None, text
        found = re.search(r"listening on (\S+)", text)
        if found and httpx.get(f"{found[1]}/ready").status_code == 200:
            return found[1]
        time.sleep(0.2)
    raise TimeoutError(log.read_text(errors="replace"))
