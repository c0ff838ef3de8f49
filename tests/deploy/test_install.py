"""A release lives and dies on a cluster that stores what it is given, with Helm 3 and 4."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.fake_cluster import Cluster, fake_cluster
from tests.deploy.tools import CHART, find_tool, succeed

Helm = Callable[..., str]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Empty."""
    with fake_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Helm:
    """Runs one Helm against the cluster."""
    program = find_tool(request.param)
    environment = os.environ | {"HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")}

    def call(*arguments: str | Path) -> str:
        return succeed(
            program, *arguments, "--namespace", "demo", "--kube-apiserver", cluster.url, env=environment, timeout=60
        )

    return call


def change(helm: Helm, verb: str, *flags: str) -> None:
    helm(verb, "rel", CHART, "-f", CHART / "ci" / "everything-values.yaml", "--disable-openapi-validation", *flags)


def test_a_release_is_installed_changed_and_taken_back(cluster: Cluster, helm: Helm) -> None:
    change(helm, "install")
    assert cluster.get("deployments", "llm")["spec"]["replicas"] == 3
    assert cluster.names("services") == ["llm", "llm-pods"]
    change(helm, "upgrade", "--set", "replicas=5,service.headless=false")
    assert cluster.get("deployments", "llm")["spec"]["replicas"] == 5
    assert cluster.names("services") == ["llm"]
    helm("rollback", "rel", "1")
    assert cluster.get("deployments", "llm")["spec"]["replicas"] == 3
    assert cluster.names("services") == ["llm", "llm-pods"]
    assert "deployed" in helm("status", "rel")
    helm("uninstall", "rel")
    assert {key[1] for key in cluster.objects} <= {"namespaces"}


def test_an_autoscaler_takes_the_replicas_over(cluster: Cluster, helm: Helm) -> None:
    change(helm, "install")
    keda = "autoscaling.kind=keda,autoscaling.keda.serverAddress=http://prometheus:9090"
    change(helm, "upgrade", "--set", keda)
    assert cluster.names("scaledobjects") == ["llm"]
    assert "replicas" not in cluster.get("deployments", "llm")["spec"]


def test_the_notes_say_what_to_watch(helm: Helm) -> None:
    notes = helm("install", "rel", CHART, "--disable-openapi-validation")
    assert "rollout status deployment/rel-peagle" in notes
    assert "There is one replica" in notes
    assert "Each new pod fetches the model again" in notes


def test_bad_values_leave_the_release_alone(cluster: Cluster, helm: Helm) -> None:
    change(helm, "install")
    before = dict(cluster.objects)
    with pytest.raises(AssertionError, match=r"additional properties|Additional property"):
        change(helm, "upgrade", "--set", "replica=5")
    assert cluster.objects == before
