"""One tiny checkpoint for all tests of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.engine import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "tiny")
