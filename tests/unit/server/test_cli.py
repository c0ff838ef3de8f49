"""The console command: exit codes, one-line errors, and that the quick commands stay quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from peagle.errors import ModelLoadError
from peagle.spec_config import SpecConfig
from server.cli import main
from server.config_options import config_groups
from server.settings import Settings


@pytest.fixture(autouse=True)
def _no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in [name for name in os.environ if name.startswith("PEAGLE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))


@dataclass
class MainStub:
    """Stands where `server.main` is; the real one would serve until stopped."""

    outcome: int | BaseException = 7
    calls: list[Settings] = field(default_factory=list)

    def run(self, settings: Settings) -> int:
        self.calls.append(settings)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def server_main(monkeypatch: pytest.MonkeyPatch) -> MainStub:
    stub = MainStub()
    module = ModuleType("server.main")
    module.run = stub.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server.main", module)
    return stub


def test_serve_hands_the_merged_settings_over(server_main: MainStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_MAX_NUM_SEQS", "4")
    flags = ["--model", "some/dir", "--port=0", "--no-enable-prefix-caching", "--served-model-name", "a,b"]
    assert main(["serve", *flags, "--speculative-config", '{"model": "h", "num_speculative_tokens": 2}']) == 7
    (settings,) = server_main.calls
    assert settings.engine.model.model == "some/dir"
    assert settings.engine.scheduler.max_num_seqs == 4
    assert not settings.engine.cache.enable_prefix_caching
    assert settings.engine.spec == SpecConfig(model="h", num_speculative_tokens=2)
    assert (settings.server.port, settings.server.served_model_name) == (0, ("a", "b"))


def test_fetch_says_what_to_do_when_the_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "file"))
    assert main(["fetch"]) == 1
    assert "PEAGLE_CACHE moves it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--prot", "80"], "unknown key '--prot' in `peagle serve`; did you mean '--port'?"),
        (["serve", "--prot=80"], "did you mean '--port'?"),
        (["serve", "--max-num"], "did you mean '--max-num-seqs'?"),
        (["serve", "--port"], "--port: expected one argument"),
        (["serve", "--port", "1", "--port", "2"], "--port is given twice"),
        (["serve", "--port", "many"], "flag --port: wanted a whole number; got 'many'"),
        (["serve", "--port", "-1"], "port must be between 0 and 65535, got -1 (port is set by flag --port)"),
        (["serve", "here", "there"], "unexpected argument 'there'"),
        (["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
        (["serv"], "invalid choice: 'serv'"),
        ([], "COMMAND"),
        (["fetch", "--forse"], "did you mean '--force'?"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("peagle: error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_failures_are_one_line_and_exit_code_1(server_main: MainStub, capsys: pytest.CaptureFixture[str]) -> None:
    server_main.outcome = ModelLoadError("the checkpoint\nhas no weights")
    assert main(["serve", "--model", "x"]) == 1
    assert capsys.readouterr().err == "peagle: error: the checkpoint has no weights\n"


def test_ctrl_c_is_exit_code_130(server_main: MainStub) -> None:
    server_main.outcome = KeyboardInterrupt()
    assert main(["serve", "--model", "x"]) == 130


def test_print_config_prints_and_serves_nothing(server_main: MainStub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config", "--seed", "5"]) == 0
    assert "seed: 5  # flag --seed" in capsys.readouterr().out
    assert not server_main.calls


def test_serve_help_groups_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    position = 0
    for group in config_groups():
        position = shown.index(f"\n{group.title}:\n", position)
        for key in group.keys:
            position = shown.index(f"\n  {key.flag}", position)
    assert "what gpu_memory_utilization leaves" in shown


def test_the_command_of_a_published_head_works_unchanged(
    server_main: MainStub, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on the cards of the released P-EAGLE heads, but for the program's name."""
    spec = {"method": "eagle3", "model": "amazon/gpt-oss-120b-p-eagle", "num_speculative_tokens": 5}
    words = ["serve", "openai/gpt-oss-120b", "--speculative-config", json.dumps(spec | {"parallel_drafting": True})]
    words += (
        "--tp 1 --max-num-batched-tokens 32768 --kv-cache-dtype fp8 --async-scheduling --stream-interval 20".split()
    )
    words += "--max-cudagraph-capture-size 4096 --no-enable-prefix-caching --port 8040".split()
    words += "--gpu-memory-utilization 0.9 --max-num-seqs 128 --max-model-len 32768".split()
    assert main(words) == server_main.outcome
    (settings,) = server_main.calls
    engine = settings.engine
    assert (engine.model.model, engine.model.max_model_len) == ("openai/gpt-oss-120b", 32768)
    assert (engine.spec.model, engine.spec.num_speculative_tokens) == ("amazon/gpt-oss-120b-p-eagle", 5)
    assert (engine.cache.kv_cache_dtype, engine.cache.gpu_memory_utilization) == ("fp8", 0.9)
    assert (engine.scheduler.max_num_seqs, engine.cache.enable_prefix_caching) == (128, False)
    warned = capsys.readouterr().err
    for flag in ("--async-scheduling", "--stream-interval", "--max-cudagraph-capture-size"):
        assert f"{flag} has no effect here" in warned
    assert engine.model.tensor_parallel_size == 1


@pytest.mark.parametrize("command", ["serve", "chat", "fetch", "version", "bench"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"peagle {command}" in capsys.readouterr().out


def test_version_names_peagle_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"peagle {version('peagle')}"
    assert f"torch {version('torch')}" in lines


@pytest.mark.parametrize(
    "words", ["['version']", "['serve', '--print-config']", "['serve', '--nonsense']", "['fetch', '--wheel', '/none']"]
)
def test_quick_commands_never_import_torch(words: str) -> None:
    code = f"import sys; from server.cli import main; main({words}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_serve_takes_the_model_as_a_word(server_main: MainStub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "some/dir", "--port", "0"]) == 7
    assert server_main.calls[0].engine.model.model == "some/dir"
    assert main(["serve", "some/dir", "--model", "other"]) == 2
    assert "given twice" in capsys.readouterr().err
