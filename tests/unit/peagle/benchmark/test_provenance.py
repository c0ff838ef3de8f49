"""Where numbers come from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from peagle.benchmark.provenance import describe, git_commit, machine, mask_secrets

CPUINFO = """processor\t: 0
model name\t: Fast CPU @ 3 GHz
flags\t\t: fpu avx avx2 f16c

processor\t: 1
model name\t: Other CPU
flags\t\t: avx512f
"""


def test_secrets_are_masked_in_both_spellings() -> None:
    words = ["--api-key", "sk-1", "--model=x", "--compare-api-key=sk-2", "--seed", "3"]
    assert mask_secrets(words) == ["--api-key", "***", "--model=x", "--compare-api-key=***", "--seed", "3"]


def test_the_first_processor_is_described(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    described = machine(tmp_path / "cpuinfo")
    assert (described["cpu"], described["simd"]) == ("Fast CPU @ 3 GHz", ["avx2", "f16c"])


def test_a_system_without_cpuinfo_is_described_too(tmp_path: Path) -> None:
    described = machine(tmp_path / "missing")
    assert described["cpu"]
    assert described["simd"] == []


def test_commit_and_local_changes(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert git_commit(tmp_path) is None
    git("init")
    assert git_commit(tmp_path) is None
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    assert git_commit(tmp_path) == {"sha": git("rev-parse", "HEAD"), "has_local_changes": False}
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == {"sha": git("rev-parse", "HEAD"), "has_local_changes": True}


def test_the_whole_fits_into_json() -> None:
    described = json.loads(json.dumps(describe(["--seed", "1"])))
    assert described["argv"] == ["--seed", "1"]
    assert {"python", "httpx"} <= described["versions"].keys()
    assert described["client_machine"]["num_usable_cpus"] >= 1
