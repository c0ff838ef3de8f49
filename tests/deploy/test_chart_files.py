"""What of the chart can be judged without Helm."""

from __future__ import annotations

import sys

import yaml

import peagle
from tests.builders.server import live_server
from tests.deploy.tools import CHART, run, succeed
from tests.fakes import Say, ScriptedEngine
from tests.source_tree import ROOT

CHAT_ONCE = CHART / "files" / "chat_once.py"


def test_the_schema_knows_every_key_of_the_server() -> None:
    done = run(sys.executable, ROOT / "scripts" / "chart_schema", "--check")
    assert done.returncode == 0, done.stderr


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == peagle.__version__
    assert f"ARG VERSION={peagle.__version__}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"peagle:{peagle.__version__}" in (ROOT / "docker-compose.yml").read_text(encoding="utf-8")


def test_the_test_hook_passes_on_an_answer() -> None:
    with live_server(ScriptedEngine(script=[Say("Hi")])) as server:
        assert succeed(sys.executable, CHAT_ONCE, server.url) == "acme/tiny answers\n"


def test_the_test_hook_fails_without_a_token() -> None:
    with live_server(ScriptedEngine(script=[])) as server:
        assert run(sys.executable, CHAT_ONCE, server.url).returncode == 1
