"""Ray Serve: two replicas of the server's application, which really answer."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from peagle.errors import ConfigError
from server.ray_app import build
from tests.deploy.tools import TOOLS, only_in_deploy_check, succeed
from tests.source_tree import ROOT


def test_without_ray_it_says_what_to_install() -> None:
    if "ray" in sys.modules:
        pytest.skip("Ray is installed")
    with pytest.raises(ConfigError, match=r"peagle\[ray\]"):
        build({})


def test_two_replicas_answer(tmp_path: Path) -> None:
    only_in_deploy_check()
    python = TOOLS / "ray" / "bin" / "python"
    if not python.exists():
        pytest.skip("Ray is not here; `make deploy-check` installs it")
    # Ray comes from its own environment, and everything else from this one.
    paths = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])
    output = succeed(
        python, ROOT / "tests/deploy/ray_serve.py", tmp_path, env=os.environ | {"PYTHONPATH": paths}, timeout=400
    )
    report = json.loads(output.splitlines()[-1])
    assert report == {
        "num_answers": 24,
        "num_different": 1,  # greedy: it does not matter which replica answers, and whether as a stream
        "replicas": {"RUNNING": 2},
        "health": 200,
        "refused": 400,
    }
