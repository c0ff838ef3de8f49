"""The metrics file: whole lines, and a resumed run forgets what it will do again."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.errors import ConfigError
from peagle.training.metrics_log import MetricsLog, read_metrics


def test_entries_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(step=1, loss=2.5, num_tokens=10)
    log.append(step=2, loss=float("nan"), acceptance=[0.5, float("inf")])
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 2.5, "num_tokens": 10},
        {"step": 2, "loss": None, "acceptance": [0.5, None]},
    ]


@pytest.mark.parametrize(("resume_step", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_a_resumed_run_forgets_later_steps(tmp_path: Path, resume_step: int, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.append(step=step)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    MetricsLog(path, resume_step=resume_step).append(step=7)
    assert [entry["step"] for entry in read_metrics(path)] == [*kept, 7]


@pytest.mark.parametrize(
    ("text", "message"), [("{]\n", "not JSON"), ("[1]\n", "no 'step'"), ('{"a": 1}\n', "no 'step'")]
)
def test_another_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        MetricsLog(path, resume_step=1)
    assert path.read_text() == text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no metrics at"):
        read_metrics(tmp_path / "metrics.jsonl")
