"""docs/metrics.md names everything that is exported."""

from __future__ import annotations

import subprocess
import sys

from server.main import create_app
from server.settings import Settings
from tests.builders.server import starter
from tests.fakes import ScriptedEngine
from tests.source_tree import ROOT

PAGE = ROOT / "docs" / "metrics.md"


def test_the_table_of_the_engine_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "metrics_table"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_metric_of_the_process_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    endings = {"counter": "_total", "info": "_info"}
    for metric in create_app(Settings(), starter(ScriptedEngine())).state.metrics_registry.collect():
        assert f"`{metric.name}{endings.get(metric.type, '')}`" in text, metric.name
