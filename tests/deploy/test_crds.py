"""The kinds that Kubernetes itself does not know, by the schemas that their operators bring."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.tools import CHART, TOOLS, Manifest, find_tool, of_kind, only, template

SCRIPT = Path(__file__).parent / "validate_crds.mjs"
KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute")

Validate = Callable[[list[Manifest]], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def validate() -> Validate:
    """Runs the schemas over manifests."""
    node = find_tool("node")
    if not (TOOLS / "node_modules" / "@kubernetes-models").is_dir():
        pytest.skip("the CRDs' schemas are not here; `make deploy-check` installs them")

    def call(manifests: list[Manifest]) -> subprocess.CompletedProcess[str]:
        command = [node, "--input-type=module", "--eval", SCRIPT.read_text(encoding="utf-8")]
        return subprocess.run(
            command, cwd=TOOLS, input=json.dumps(manifests), capture_output=True, text=True, check=False
        )

    return call


@pytest.fixture(scope="module")
def customs() -> list[Manifest]:
    """Every custom resource of every values file."""
    helm = find_tool("helm4")
    rendered = [template(helm, "-f", path) for path in sorted((CHART / "ci").glob("*.yaml"))]
    return [manifest for manifests in rendered for kind in KINDS for manifest in of_kind(manifests, kind)]


def test_custom_resources_are_valid(validate: Validate, customs: list[Manifest]) -> None:
    assert {manifest["kind"] for manifest in customs} == set(KINDS)
    done = validate(customs)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_schemas_refuse_what_is_wrong(validate: Validate, customs: list[Manifest], kind: str) -> None:
    broken: dict[str, Any] = copy.deepcopy(next(manifest for manifest in customs if manifest["kind"] == kind))
    name = next(iter(broken["spec"]))
    broken["spec"][name] = 5
    done = validate([broken])
    assert done.returncode == 1
    assert kind in done.stdout


def test_the_pool_has_what_its_api_requires() -> None:
    """No registry has this CRD: the fields that v1 requires, by hand."""
    pool = only(template(find_tool("helm4"), "-f", CHART / "ci" / "inferencepool-values.yaml"), "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"].keys() == {"selector", "targetPorts", "endpointPickerRef"}
    assert pool["spec"]["selector"].keys() == {"matchLabels"}
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    assert pool["spec"]["endpointPickerRef"] == {
        "name": "rel-picker",
        "port": {"number": 9002},
        "failureMode": "FailOpen",
    }
