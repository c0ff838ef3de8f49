"""Checkpoints that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peagle.errors import ModelLoadError
from tests.builders.engine import make_engine, write_checkpoint


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_weights_that_are_cut_short_are_refused_by_name(tmp_path: Path, share: float) -> None:
    directory = write_checkpoint(tmp_path / "tiny")
    (weights,) = directory.glob("*.safetensors")
    os.truncate(weights, int(weights.stat().st_size * share))
    with pytest.raises(ModelLoadError, match=f"cannot read .*{weights.name}"):
        make_engine(directory)
