"""`peagle health` against a server on a real socket: it finds the port and the scheme where `peagle serve` does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli import main
from tests.builders.server import LiveServer, live_server
from tests.fakes import ScriptedEngine


@pytest.fixture(autouse=True)
def _no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("PEAGLE_")]:
        monkeypatch.delenv(variable)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine()) as running:
        yield running


def port_of(server: LiveServer) -> str:
    return server.url.rsplit(":", 1)[1]


@pytest.mark.parametrize("variable", ["PEAGLE_PORT", "SAGEMAKER_BIND_TO_PORT"])
@pytest.mark.parametrize("words", [["health"], ["health", "--ready"]])
def test_the_port_is_that_of_a_variable(
    server: LiveServer,
    variable: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, port_of(server))
    monkeypatch.setenv("PEAGLE_HOST", "0.0.0.0")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody's business, on the machine itself
    assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_the_port_is_that_of_the_file(server: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "peagle.yaml").write_text(f"port: {port_of(server)}\n", encoding="utf-8")
    assert main(["health", "--config", str(tmp_path / "peagle.yaml")]) == 0


def test_nobody_there_is_exit_code_1_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--port", "9", "--host", "::1"]) == 1
    assert capsys.readouterr().err.startswith("peagle: http://[::1]:9/health: ")


def test_what_the_server_complains_of_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine()
    with live_server(engine) as running:
        engine.is_alive = False
        assert main(["health", "--port", port_of(running)]) == 1
    assert "/health: 503 {" in capsys.readouterr().err


def test_any_free_port_is_nowhere_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--port", "0"]) == 2
    assert "give --port" in capsys.readouterr().err
