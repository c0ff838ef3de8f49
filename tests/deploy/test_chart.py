"""The Helm chart, rendered by Helm 3 and 4 from every values file of its `ci` directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from server.config_sources import load_settings
from server.lifespan import ABORT_GRACE_S, ENGINE_STOP_TIMEOUT_S
from tests.deploy.tools import (
    CHART,
    DASHBOARD,
    RULES,
    Manifest,
    find_tool,
    of_kind,
    only,
    only_in_deploy_check,
    run,
    succeed,
    template,
)

VALUES = sorted((CHART / "ci").glob("*.yaml"))
NEWEST = "1.37"

BAD_VALUES = {
    "an unknown key": ("replica: 2", "replica"),
    "an unknown key below": ("image: {tagg: x}", "tagg"),
    "an unknown server key": ("config: {max_num_seq: 4}", "max_num_seq"),
    "a server key of the wrong type": ("config: {max_num_seqs: many}", "max_num_seqs"),
    "a key that the chart sets": ("config: {port: 9000}", "port"),
    "an unknown speculation key": ("config: {speculative_config: {modell: x}}", "modell"),
    "an unknown source": ("model: {source: s3, name: x}", "source"),
    "a hub model without a name": ("model: {source: hub}", "name"),
    "a claim without a name": ("model: {source: pvc}", "claimName"),
    "a name for the default model": ("model: {name: x}", "name"),
    "an existing cache without a name": ("cache: {kind: existing}", "existingClaim"),
    "a cache claim that is not used": ("cache: {existingClaim: x}", "existingClaim"),
    "a broken digest": ("image: {digest: latest}", "digest"),
    "two autoscalers": ("autoscaling: {kind: both}", "kind"),
    "KEDA without Prometheus": ("autoscaling: {kind: keda}", "serverAddress"),
    "KEDA's address without KEDA": ("autoscaling: {kind: hpa, keda: {serverAddress: 'http://p'}}", "serverAddress"),
    "more at least than at most": ("autoscaling: {kind: hpa, minReplicas: 9}", "above autoscaling.maxReplicas"),
    "zero replicas that count themselves": ("autoscaling: {kind: hpa, minReplicas: 0}", "a pod that is not there"),
    "a metric that the adapter cannot have": ("autoscaling: {hpa: {runningMetric: 'vllm:x'}}", "runningMetric"),
    "two monitors": ("{serviceMonitor: {enabled: true}, podMonitor: {enabled: true}}", "counted twice"),
    "a GPU that idles": ("{gpu: {enabled: true}, config: {device: cpu}}", "leave idle"),
    "a claim that cannot be shared": ("{replicas: 2, cache: {kind: create}}", "ReadWriteMany"),
    "a claim in a rolling update": ("cache: {kind: create}", "Recreate"),
    "no way to the model": ("networkPolicy: {enabled: true, egress: {https: false}}", "from fetching its model"),
    "an ingress for nobody": ("ingress: {enabled: true}", "hosts"),
    "a route without a gateway": ("httpRoute: {enabled: true}", "parentRefs"),
    "a pool without a picker": ("inferencePool: {enabled: true}", "name"),
    "a negative drain": ("drain: {timeoutSeconds: -1}", "timeoutSeconds"),
    "no start-up probe": ("probes: {startup: null}", "startup"),
    "a file of keys beside the chart's": ("config: {api_key_file: /x}", "api_key_file"),
    "a port that needs privileges": ("containerPort: 80", "containerPort"),
    "a size that is none": ("sharedMemory: lots", "sharedMemory"),
}


@pytest.fixture(scope="module", params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> str:
    """Path of one Helm."""
    return find_tool(request.param)


@pytest.fixture(params=VALUES, ids=lambda path: path.stem.removesuffix("-values"))
def manifests(request: pytest.FixtureRequest, helm: str) -> list[Manifest]:
    """What one values file renders to."""
    return template(helm, "-f", request.param)


def pod_specs(manifests: list[Manifest]) -> list[dict[str, Any]]:
    specs = [manifest["spec"]["template"]["spec"] for manifest in of_kind(manifests, "Deployment")]
    return specs + [manifest["spec"] for manifest in of_kind(manifests, "Pod")]


def server_container(manifests: list[Manifest]) -> dict[str, Any]:
    spec = only(manifests, "Deployment")["spec"]["template"]["spec"]
    container: dict[str, Any] = next(part for part in spec["containers"] if part["name"] == "peagle")
    return container


def server_config(manifests: list[Manifest]) -> str:
    maps = of_kind(manifests, "ConfigMap")
    text: str = next(entry["data"]["config.yaml"] for entry in maps if "config.yaml" in entry["data"])
    return text


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_lint_has_no_complaint(helm: str, path: Path) -> None:
    assert "0 chart(s) failed" in succeed(helm, "lint", "--strict", CHART, "-f", path)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_are_refused(helm: str, tmp_path: Path, name: str) -> None:
    values, hint = BAD_VALUES[name]
    path = tmp_path / "values.yaml"
    path.write_text(values, encoding="utf-8")
    done = run(helm, "template", "rel", CHART, "-f", path)
    assert done.returncode != 0
    assert hint in done.stderr


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(28, 38)])
def test_manifests_are_valid_kubernetes(tmp_path: Path, version: str) -> None:
    only_in_deploy_check()
    helm, validate = find_tool("helm4"), find_tool("kubernetes-validate")
    path = tmp_path / "all.yaml"
    with path.open("w", encoding="utf-8") as file:
        for values in VALUES:
            file.write(succeed(helm, "template", "rel", CHART, "-f", values, "--kube-version", version))
    done = run(validate, "-k", version, "--strict", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pods_pass_the_restricted_standard(manifests: list[Manifest]) -> None:
    for spec in pod_specs(manifests):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        kinds = {kind for volume in spec.get("volumes", []) for kind in volume.keys() - {"name"}}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
        for container in spec["containers"]:
            if container["name"] in ("sidecar",):  # not ours
                continue
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_pod_outlives_the_drain(manifests: list[Manifest]) -> None:
    spec = only(manifests, "Deployment")["spec"]["template"]["spec"]
    pre_stop_s = server_container(manifests)["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_s = yaml.safe_load(server_config(manifests))["shutdown_timeout_s"]
    longest_s = pre_stop_s + drain_s + ABORT_GRACE_S + ENGINE_STOP_TIMEOUT_S
    assert longest_s < spec["terminationGracePeriodSeconds"] <= longest_s + 5


def test_the_rollout_waits_for_the_start(manifests: list[Manifest]) -> None:
    probe = server_container(manifests)["startupProbe"]
    budget_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert budget_s >= 1800
    assert only(manifests, "Deployment")["spec"]["progressDeadlineSeconds"] >= budget_s + 300


def test_the_server_accepts_its_configuration(manifests: list[Manifest], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(server_config(manifests), encoding="utf-8")
    container = server_container(manifests)
    variables = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    loaded = load_settings(flags={"config": str(path)}, environment=variables)
    assert loaded.settings.server.port == container["ports"][0]["containerPort"]


def test_one_thing_decides_the_number_of_replicas(manifests: list[Manifest]) -> None:
    deciders = [
        "replicas" in only(manifests, "Deployment")["spec"],
        bool(of_kind(manifests, "HorizontalPodAutoscaler")),
        bool(of_kind(manifests, "ScaledObject")),
    ]
    assert sum(deciders) == 1


def test_a_budget_only_where_a_pod_can_be_spared(manifests: list[Manifest]) -> None:
    scalers = of_kind(manifests, "HorizontalPodAutoscaler") + of_kind(manifests, "ScaledObject")
    if scalers:
        spec = scalers[0]["spec"]
        num_replicas = spec.get("minReplicas", spec.get("minReplicaCount"))
    else:
        num_replicas = only(manifests, "Deployment")["spec"]["replicas"]
    assert bool(of_kind(manifests, "PodDisruptionBudget")) == (num_replicas > 1)


def test_services_select_the_pods(manifests: list[Manifest]) -> None:
    labels = only(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for service in of_kind(manifests, "Service"):
        assert service["spec"]["selector"].items() <= labels.items()
        assert service["spec"]["ports"][0]["targetPort"] == "http"


def test_kedas_query_is_one_series_of_this_release() -> None:
    manifests = template(find_tool("helm4"), "-f", CHART / "ci" / "keda-values.yaml")
    (trigger,) = only(manifests, "ScaledObject")["spec"]["triggers"]
    labels = '{namespace="demo",service="rel-peagle"}'
    assert trigger["metadata"]["query"] == (
        f"sum(vllm:num_requests_running{labels}) + sum(vllm:num_requests_waiting{labels})"
    )
    (endpoint,) = only(manifests, "ServiceMonitor")["spec"]["endpoints"]
    replaced = {entry["targetLabel"]: entry["replacement"] for entry in endpoint["relabelings"]}
    assert replaced == {"job": "peagle", "service": "rel-peagle"}


def test_rules_and_dashboard_are_the_files() -> None:
    manifests = template(find_tool("helm4"), "-f", CHART / "ci" / "everything-values.yaml")
    assert only(manifests, "PrometheusRule")["spec"] == yaml.safe_load(RULES.read_text(encoding="utf-8"))
    maps = {manifest["metadata"]["name"]: manifest.get("data", {}) for manifest in of_kind(manifests, "ConfigMap")}
    assert maps["llm-dashboard"]["peagle.json"].strip() == DASHBOARD.read_text(encoding="utf-8").strip()


def test_keys_come_from_a_secret_and_from_nowhere_else() -> None:
    manifests = template(find_tool("helm4"), "-f", CHART / "ci" / "everything-values.yaml")
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "api-keys"]
    assert volume["secret"] == {"secretName": "rel-keys", "items": [{"key": "api-keys", "path": "api-keys"}]}
    (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "api-keys"]
    (data,) = [one["data"] for one in of_kind(manifests, "ConfigMap") if "config.yaml" in one.get("data", {})]
    config = yaml.safe_load(data["config.yaml"])
    assert config["api_key_file"] == f"{mount['mountPath']}/api-keys"
    (variable,) = only(manifests, "Pod")["spec"]["containers"][0]["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "rel-keys", "key": "test"}
    for manifest in template(find_tool("helm4"), "-f", CHART / "ci" / "minimal-values.yaml"):
        assert "api-keys" not in yaml.safe_dump(manifest)


def test_gpus_are_requested_as_they_are_limited() -> None:
    manifests = template(find_tool("helm4"), "-f", CHART / "ci" / "everything-values.yaml")
    resources = server_container(manifests)["resources"]
    assert resources["requests"]["amd.com/gpu"] == resources["limits"]["amd.com/gpu"] == "2"


def test_old_kubelets_sleep_in_the_container() -> None:
    manifests = template(find_tool("helm4"), "--kube-version", "1.29")
    assert server_container(manifests)["lifecycle"]["preStop"]["exec"]["command"][0] == "python3"


def test_a_changed_configuration_restarts_the_pods(tmp_path: Path) -> None:
    helm = find_tool("helm4")

    def checksum(*flags: str) -> str:
        metadata = only(template(helm, *flags), "Deployment")["spec"]["template"]["metadata"]
        return str(metadata["annotations"]["checksum/config"])

    assert checksum() == checksum("--set", "replicas=3")
    assert checksum() != checksum("--set", "config.max_num_seqs=4")
