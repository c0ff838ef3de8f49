"""The app as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server.main import listen, model_id
from tests.builders.server import serving
from tests.fakes import ScriptedEngine


def test_the_server_imports_no_torch() -> None:
    program = "import sys, server.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


async def test_the_documentation_resolves_every_reference() -> None:
    async with serving(ScriptedEngine()) as client:
        schema = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == 200
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in body["required"]
    references: list[str] = []

    def collect(node: object) -> None:
        if isinstance(node, dict):
            references.extend(value for key, value in node.items() if key == "$ref")
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(schema)
    assert "#/components/schemas/ChatMessage" in references
    assert {reference.rpartition("/")[2] for reference in references} <= set(schema["components"]["schemas"])


def test_a_model_is_named_by_its_id_or_the_end_of_its_path(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "other.gguf").touch()
    assert model_id("acme/tiny") == "acme/tiny"
    assert model_id(str(tmp_path / "tiny")) == "tiny"
    assert model_id(f"{tmp_path}/tiny/../tiny/") == "tiny"
    assert model_id(str(tmp_path / "other.gguf")) == "other"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_listening(host: str) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen(host, port)
