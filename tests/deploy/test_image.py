"""The image is built and run as a cluster would run it: as 10001, read-only, without capabilities. It answers a chat.

Takes minutes and disk, so `make deploy-check` runs it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.builders.real_server import real_model_directory
from tests.deploy.containers import Containers
from tests.deploy.tools import TOOLS, find_tool, of_kind, only, only_in_deploy_check, template

IMAGE = "localhost/peagle:check"
READY_TIMEOUT_S = 120.0
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
LOCKED_DOWN = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]


@pytest.fixture(scope="module")
def containers() -> Containers:
    """With the image built."""
    only_in_deploy_check()
    containers = Containers.create(TOOLS / "containers")
    containers.build(IMAGE, target="server")
    return containers


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_ready(url: str, containers: Containers, name: str) -> None:
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up_at:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"{name} was not ready in time:\n{containers.podman('logs', name)}")


def ask(url: str) -> str:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    reply = httpx.post(f"{url}/v1/chat/completions", json=QUESTION | {"model": model, "max_tokens": 8}, timeout=60)
    answer: str = reply.json()["choices"][0]["message"]["content"]
    return answer


@contextmanager
def container(containers: Containers) -> Iterator[tuple[str, str]]:
    """Yields the name and the URL of a locked-down container with the default model mounted."""
    name, port = "peagle-check", free_port()
    model = real_model_directory()
    mounted = f"{model.parent}:/data/peagle/models:ro"
    flags = ["--publish", f"127.0.0.1:{port}:8000", "--volume", mounted, "--env", "PEAGLE_NUM_THREADS=1"]
    containers.remove(name)
    containers.podman("run", "--detach", "--name", name, "--no-healthcheck", *LOCKED_DOWN, *flags, IMAGE)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, containers, name)
        yield name, url
    finally:
        containers.remove(name)


def test_a_locked_down_container_answers_and_stops_cleanly(containers: Containers) -> None:
    with container(containers) as (name, url):
        assert "Paris" in ask(url)
        assert containers.podman("exec", name, "id", "-u") == "10001"
        capabilities = containers.podman("exec", name, "grep", "^Cap", "/proc/1/status").split()[1::2]
        assert set(capabilities) == {"0" * 16}
        assert containers.podman("exec", name, "sh", "-c", "touch /x 2>/dev/null || echo refused") == "refused"
        probe = containers.podman("inspect", IMAGE, "--format", "{{json .HealthCheck.Test}}")
        assert containers.podman("exec", name, *yaml.safe_load(probe)[1:]) == ""
        containers.podman("stop", "--time", "45", name)
        assert containers.podman("inspect", name, "--format", "{{.State.ExitCode}}") == "0"


def test_the_image_has_no_weights_but_the_head_and_says_what_it_is(containers: Containers) -> None:
    find = ["--entrypoint", "find", IMAGE, "/opt", "/data", "-name", "*.safetensors", "-o", "-name", "*.gguf"]
    (head,) = containers.podman("run", "--rm", *find).split()
    assert head.endswith("/peagle/heads/smollm2-135m-instruct/model.safetensors")
    labels = containers.podman("inspect", IMAGE, "--format", "{{json .Labels}}")
    assert yaml.safe_load(labels)["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_the_rendered_deployment_answers(containers: Containers, tmp_path: Path) -> None:
    """`podman kube play` in place of a kubelet, with the model's directory from the host in place of a claim."""
    port, model = free_port(), real_model_directory()
    values = {
        "image": {"repository": "localhost/peagle", "tag": "check", "pullPolicy": "Never"},
        "model": {"source": "image", "name": f"/models/{model.name}"},
        "config": {"num_threads": 1},
        "extraVolumes": [{"name": "models", "hostPath": {"path": str(model.parent)}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    }
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    manifests = template(find_tool("helm4"), "-f", path)
    deployment: dict[str, Any] = only(manifests, "Deployment")
    (spec,) = deployment["spec"]["template"]["spec"]["containers"]
    spec["ports"][0] |= {"hostPort": port, "hostIP": "127.0.0.1"}
    play = tmp_path / "play.yaml"
    play.write_text(yaml.safe_dump_all([*of_kind(manifests, "ConfigMap"), deployment]), encoding="utf-8")
    containers.podman("kube", "play", "--replace", play)
    try:
        url = f"http://127.0.0.1:{port}"
        names = containers.podman("ps", "--format", "{{.Names}}").split()
        (name,) = [name for name in names if name.startswith("rel-peagle-pod") and name.endswith("-peagle")]
        wait_until_ready(url, containers, name)
        assert "Paris" in ask(url)
        assert httpx.get(f"{url}{spec['livenessProbe']['httpGet']['path']}").status_code == 200
        assert containers.podman("exec", name, "id", "-u") == "10001"
    finally:
        containers.podman("kube", "down", play)
