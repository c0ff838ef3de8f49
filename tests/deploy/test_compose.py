"""docker-compose.yml: valid, hardened, and in agreement with the server and with the files it mounts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from server.config_options import config_groups
from server.lifespan import ABORT_GRACE_S, ENGINE_STOP_TIMEOUT_S
from server.settings import ServerConfig
from tests.deploy.tools import COMPOSE, find_tool, succeed
from tests.source_tree import ROOT


def services() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    return loaded


@pytest.mark.parametrize("name", services())
def test_services_are_locked_down_and_local(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_what_is_mounted_exists() -> None:
    mounts = [volume for service in services().values() for volume in service["volumes"] if volume.startswith("./")]
    assert len(mounts) >= 5
    assert [mount for mount in mounts if not (ROOT / mount.split(":")[0]).exists()] == []


def test_the_server_is_left_time_to_drain() -> None:
    grace_s = int(services()["server"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > ServerConfig().shutdown_timeout_s + ABORT_GRACE_S + ENGINE_STOP_TIMEOUT_S


def test_the_server_knows_its_variables() -> None:
    known = {key.variable for group in config_groups() for key in group.keys}
    given = {name for name in services()["server"]["environment"] if name.startswith("PEAGLE_")}
    assert given <= known


def test_the_scrape_is_the_one_that_rules_look_for() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8"))
    (scrape,) = config["scrape_configs"]
    assert scrape["job_name"] == "peagle"
    assert scrape["static_configs"] == [{"targets": ["server:8000"]}]


def test_load_variables_are_options_of_the_locustfile() -> None:
    options = re.findall(r'add\("--([a-z-]+)"', (ROOT / "loadtest" / "locustfile.py").read_text(encoding="utf-8"))
    variables = {"LOADTEST_" + option.replace("-", "_").upper() for option in options}
    given = services()["loadtest"]["environment"]
    assert {name for name in given if name.startswith("LOADTEST_")} <= variables


def test_compose_accepts_every_profile() -> None:
    assert succeed(find_tool("docker-compose"), "-f", COMPOSE, "--profile", "loadtest", "config", "-q") == ""
