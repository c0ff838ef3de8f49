"""The rules and the dashboard: valid, about metrics that exist, and each query answered by a server under load."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from peagle import EngineHealth, EngineStats
from server.engine_metrics import Snapshot
from server.main import create_app
from server.prometheus import engine_metrics
from server.settings import Settings
from tests.builders.real_server import real_server
from tests.builders.server import starter
from tests.deploy.tools import DASHBOARD, RULES, find_tool, only_in_deploy_check, run, succeed
from tests.fakes import ScriptedEngine
from tests.source_tree import ROOT

RULES_TEST = Path(__file__).parent / "rules_test.yaml"
METRIC = re.compile(r"(?<![\w:])(vllm:\w+|peagle_\w+|http_\w+|process_\w+|up\b)")
SCRAPE_INTERVAL_S = 1
REPETITION = "Repeat after me: one two three four, one two three four, one two three four, one two three four."
# Drafts without a head, from the prompt: the speculation panels have something to show.
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def panel_queries() -> list[tuple[str, str]]:
    """Title and query of every target."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def without_variables(query: str) -> str:
    """As Grafana would send it, for everything."""
    for name, value in {"$__rate_interval": "30s", "$model": ".*", "$instance": ".*"}.items():
        query = query.replace(name, value)
    return query


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def served_names() -> set[str]:
    """Every sample's name, with the endings that the wire format adds."""
    names = {"up"}
    snapshot = Snapshot(EngineStats(), EngineHealth(is_alive=True, step_age_s=0.0))
    process = create_app(Settings(), starter(ScriptedEngine())).state.metrics_registry.collect()
    for metric in [*engine_metrics(snapshot, model_name="m"), *process]:
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
        names |= {metric.name + ending for ending in endings}
    return names


@pytest.mark.parametrize("query", [query for _, query in panel_queries()] + [rule["expr"] for rule in rules()])
def test_queries_name_metrics_that_are_served(query: str) -> None:
    used = {match[0] for match in METRIC.finditer(query)}
    assert used <= served_names()
    assert used or "model:peagle_" in query


def test_panels_have_ids_of_their_own_and_no_fixed_source() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    sources = [panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"]
    assert set(sources) == {"${datasource}"}
    assert all(panel["description"] for panel in panels if panel["type"] != "row")


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_every_alert_is_tested_and_explained() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    tests = yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))["tests"]
    firing = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    silent = {case["alertname"] for test in tests for case in test["alert_rule_test"] if not case["exp_alerts"]}
    assert firing == silent == set(alerts)
    assert all(rule["annotations"].keys() == {"summary", "description"} for rule in alerts.values())


def test_rules_are_valid_and_fire() -> None:
    promtool = find_tool("promtool")
    succeed(promtool, "check", "rules", RULES)
    succeed(promtool, "test", "rules", RULES_TEST)


def test_a_rule_that_cannot_fire_is_noticed(tmp_path: Path) -> None:
    promtool = find_tool("promtool")
    broken = RULES.read_text(encoding="utf-8").replace("[5m]) > 0.95", "[5m]) > 95")
    (tmp_path / "rules.yaml").write_text(broken, encoding="utf-8")
    cases = RULES_TEST.read_text(encoding="utf-8").replace("../../k8s/peagle/files/rules.yaml", "rules.yaml")
    (tmp_path / "test.yaml").write_text(cases, encoding="utf-8")
    assert run(promtool, "test", "rules", tmp_path / "test.yaml").returncode == 1


def test_panel_queries_are_valid(tmp_path: Path) -> None:
    promtool = find_tool("promtool")
    recorded = [{"record": f"panel:{i}", "expr": without_variables(q)} for i, (_, q) in enumerate(panel_queries())]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}), encoding="utf-8")
    succeed(promtool, "check", "rules", "--lint=none", path)


def test_the_compose_configuration_is_valid() -> None:
    succeed(find_tool("promtool"), "check", "config", "--syntax-only", ROOT / "deploy" / "prometheus.yml")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prometheus that has scraped a server under load for a while."""
    only_in_deploy_check()
    program = find_tool("prometheus")
    directory = tmp_path_factory.mktemp("prometheus")
    with real_server("--num-threads", "1", "--speculative-config", SPECULATION) as server:
        target = server.url.removeprefix("http://")
        config = {
            "global": {"scrape_interval": f"{SCRAPE_INTERVAL_S}s"},
            "scrape_configs": [{"job_name": "peagle", "static_configs": [{"targets": [target]}]}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address=127.0.0.1:19090"]
        with (directory / "log").open("w") as log:
            process = subprocess.Popen([program, *flags], cwd=directory, stdout=log, stderr=log)
        try:
            for _ in range(8):
                ask(server.api, server.model)
                time.sleep(SCRAPE_INTERVAL_S)
            yield "http://127.0.0.1:19090"
        finally:
            process.terminate()
            process.wait(20)


def ask(api: str, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": REPETITION}], "max_tokens": 32}
    httpx.post(f"{api}/chat/completions", json=body, timeout=60).raise_for_status()


def test_every_panel_has_data(prometheus: str) -> None:
    empty = []
    for title, query in panel_queries():
        reply = httpx.get(f"{prometheus}/api/v1/query", params={"query": without_variables(query)}).json()
        assert reply["status"] == "success", query
        if not reply["data"]["result"]:
            empty.append(title)
    assert empty == []
