"""The measurement of memory: a table and JSON, and what does not fit is said, not raised.

That segments take less is a measurement (docs/log.md); at the size of a test the numbers are noise.
"""

from __future__ import annotations

import json

import pytest

from peagle.training.memory import main


def test_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tokens", "64", "--segments", "1,6", "--layers", "1", "--depth", "4"]
    assert main(flags) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    whole, parts = json.loads(lines[-1])["points"]
    assert (whole["num_tokens"], whole["num_segments"], parts["num_segments"]) == (64, 1, 6)
    assert lines[1].split() == ["64", f"{whole['step_mib']:.0f}", f"{parts['step_mib']:.0f}"]


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "64", "--segments", "1", "--layers", "1", "--limit", "30MB"]) == 0
    assert json.loads(capsys.readouterr().out.strip().split("\n")[-1])["points"][0]["step_mib"] is None
