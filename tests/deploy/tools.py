"""The tools and files of the deployment tests. Owns where they lie, and that a test without its tool is skipped.

`make deploy-check` installs the tools and names their directory in DEPLOY_TOOLS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.source_tree import ROOT

CHART = ROOT / "k8s" / "peagle"
RULES = CHART / "files" / "rules.yaml"
DASHBOARD = CHART / "files" / "dashboard.json"
COMPOSE = ROOT / "docker-compose.yml"
TOOLS = Path(os.environ.get("DEPLOY_TOOLS", ROOT / "build" / "deploy-tools"))
NAMESPACE = "demo"
RELEASE = "rel"

Manifest = dict[str, Any]


def find_tool(name: str) -> str:
    """Path of a tool; skips the test where there is none."""
    path = shutil.which(name, path=f"{TOOLS}/bin:{TOOLS}/venv/bin:{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not here; `make deploy-check` installs it")
    return path


def only_in_deploy_check() -> None:
    """Skip what takes minutes, unless it is asked for."""
    if "DEPLOY_CHECK" not in os.environ:
        pytest.skip("takes minutes; `make deploy-check` runs it")


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end, whatever the exit code."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)


def succeed(*command: str | Path, **options: Any) -> str:
    """Run, and return stdout; the test fails if the command does."""
    done = run(*command, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def template(helm: str, *flags: str | Path) -> list[Manifest]:
    """All manifests of the chart."""
    text = succeed(helm, "template", RELEASE, CHART, "--namespace", NAMESPACE, *flags)
    return [manifest for manifest in yaml.safe_load_all(text) if manifest is not None]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Those of one kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The one of a kind."""
    (manifest,) = of_kind(manifests, kind)
    return manifest
