"""`scripts/deploy_check` says no to a values file, a compose file and a Dockerfile that are broken on purpose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.deploy.tools import COMPOSE, TOOLS, find_tool, run
from tests.source_tree import ROOT


def check(*flags: str | Path) -> tuple[int, str]:
    """Exit code and output of a run that installs nothing."""
    script = ROOT / "scripts" / "deploy_check"
    done = run(sys.executable, script, "--no-install", "--tools", TOOLS, *flags)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
@pytest.mark.parametrize("values", ["replica: 3", "autoscaling: {kind: hpa, minReplicas: 9}", "replicas: [1"])
def test_a_broken_values_file_fails(tmp_path: Path, helm: str, values: str) -> None:
    find_tool(helm)
    path = tmp_path / "values.yaml"
    path.write_text(values, encoding="utf-8")
    code, output = check("--only", helm, "--values", path)
    assert (code, output.splitlines()[0].split(":")[0]) == (1, f"FAILED   {helm}")


@pytest.mark.parametrize(
    ("old", "new"), [("    ports:", "    portss:"), ("services:\n", "services:\n  x: {image: 3}\n")]
)
def test_a_broken_compose_file_fails(tmp_path: Path, old: str, new: str) -> None:
    find_tool("docker-compose")
    path = tmp_path / "docker-compose.yml"
    path.write_text(COMPOSE.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    code, output = check("--only", "compose-file", "--compose", path)
    assert code == 1
    assert "FAILED   compose-file" in output


@pytest.mark.parametrize(
    ("old", "new"), [('ENTRYPOINT ["peagle"]', "ENTRYPOINT peagle"), ("WORKDIR /src", "WORKDIR src")]
)
def test_a_broken_dockerfile_fails(tmp_path: Path, old: str, new: str) -> None:
    find_tool("hadolint")
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "Dockerfile"
    path.write_text(text.replace(old, new), encoding="utf-8")
    code, output = check("--only", "dockerfile", "--dockerfile", path)
    assert code == 1
    assert "FAILED   dockerfile" in output


def test_a_tool_that_is_not_there_is_skipped_with_its_name(tmp_path: Path) -> None:
    code, output = check("--only", "helm3", "--tools", tmp_path)
    assert (code, output.splitlines()) == (
        0,
        ["skipped  helm3: helm3 is not here", "deploy-check: 0 ok, 1 skipped, 0 FAILED"],
    )


def test_a_check_that_does_not_exist_is_an_error() -> None:
    code, output = check("--only", "helm5")
    assert code == 2
    assert "there is no check helm5" in output
