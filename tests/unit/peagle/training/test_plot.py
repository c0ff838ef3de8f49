"""The picture of a run, and the numbers in it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from peagle.errors import ConfigError
from peagle.training.plot import Curve, acceptance_curves, loss_curves, plot_training

ENTRIES: list[dict[str, Any]] = [
    {"step": 1, "num_tokens": 0, "loss": 9.0},
    {"step": 2, "num_tokens": 100, "loss": 3.0},
    {"step": 2, "num_tokens": 100, "held_out_loss": 3.5, "acceptance": [0.2]},
    {"step": 3, "num_tokens": 200, "loss": None},
    {"step": 4, "num_tokens": 400, "loss": 2.0, "acceptance": [0.3, 0.1]},
]


def test_curves_hold_what_was_measured() -> None:
    assert loss_curves(ENTRIES) == [
        Curve(label="held out loss", num_tokens=(100,), values=(3.5,)),
        Curve(label="loss", num_tokens=(100, 400), values=(3.0, 2.0)),
    ]
    assert acceptance_curves(ENTRIES) == [
        Curve(label="position 1", num_tokens=(100, 400), values=(0.2, 0.3)),
        Curve(label="position 2", num_tokens=(400,), values=(0.1,)),
    ]


@pytest.mark.parametrize("entries", [ENTRIES, ENTRIES[:2]])
def test_a_png_is_drawn(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    path = plot_training(entries, tmp_path / "run.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to plot yet"):
        plot_training([{"step": 1, "num_tokens": 5}], tmp_path / "run.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'peagle\[train\]'"):
        plot_training(ENTRIES, tmp_path / "run.png")
