"""The examples of the deployment pages: Python and YAML that parse, and values that the chart accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.tools import CHART, find_tool, succeed
from tests.source_tree import ROOT

PAGES = [ROOT / "docs" / name for name in ("deploy.md", "scale-out.md", "sagemaker.md")]
VALUES_KEYS = set(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def blocks(language: str) -> list[str]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [block for page in PAGES for block in pattern.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("block", blocks("python"))
def test_python_compiles(block: str) -> None:
    assert compile(block, "example", "exec").co_filename == "example"


@pytest.mark.parametrize("block", blocks("yaml"))
def test_values_are_accepted(tmp_path: Path, block: str) -> None:
    values = yaml.safe_load(block)
    if not values.keys() <= VALUES_KEYS:
        return  # somebody else's chart, or a manifest; it has been parsed
    path = tmp_path / "values.yaml"
    path.write_text(block, encoding="utf-8")
    assert "kind: Deployment" in succeed(find_tool("helm4"), "template", "rel", CHART, "-f", path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
