"""Deny by default: what needs a key, which one, and what a browser may ask."""

from __future__ import annotations

import pytest

from tests.builders.server import chat_body, serving
from tests.fakes import ScriptedEngine
from tests.unit.server.test_bad_input import assert_envelope

PATH = "/v1/chat/completions"
KEY = {"authorization": "Bearer secret"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/x",
        "/version",
        "/openapi.json",
        "/docs",
        "/no/such",
        "//health",
        "/health/",
        "/v1",
        "/",
    ],
)
async def test_everything_needs_a_key_but_what_is_listed(path: str) -> None:
    async with serving(ScriptedEngine(), api_key=("secret",)) as client:
        refused = await client.get(path)
        assert_envelope(refused, status=401, code="invalid_api_key", param=None)
        assert refused.headers["www-authenticate"] == "Bearer"
        assert (await client.get(path, headers=KEY)).status_code != 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/metrics"])
async def test_supervisors_and_scrapers_need_none(path: str) -> None:
    async with serving(ScriptedEngine(), api_key=("secret",)) as client:
        assert (await client.get(path)).status_code == 200


async def test_metrics_can_be_closed() -> None:
    async with serving(ScriptedEngine(), api_key=("secret",), metrics_need_key=True) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=KEY)).status_code == 200
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer secret", 200),
        ("bearer  secret", 200),
        ("Bearer secre", 401),
        ("Bearer secrets", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("", 401),
    ],
)
async def test_the_header(header: str, status: int) -> None:
    async with serving(ScriptedEngine(), api_key=("other", "secret")) as client:
        response = await client.post(PATH, json=chat_body(), headers={"authorization": header})
    assert response.status_code == status


async def test_a_body_without_a_key_is_not_read() -> None:
    engine = ScriptedEngine()
    async with serving(engine, api_key=("secret",)) as client:
        assert (await client.post(PATH, content=b"{" * 100)).status_code == 401
    assert engine.requests == []


async def test_the_admin_key_opens_what_no_other_key_does() -> None:
    admin = {"authorization": "Bearer root"}
    async with serving(ScriptedEngine(), api_key=("secret",), admin_api_key=("root",)) as client:
        assert (await client.get("/server_info", headers=KEY)).status_code == 401
        assert (await client.get("/v1/models", headers=admin)).status_code == 401
        response = await client.get("/server_info", headers=admin)
        assert response.status_code == 200
        server = response.json()["config"]["server"]
        assert (server["port"], server["api_key"], server["admin_api_key"]) == (8000, ["***"], ["***"])


async def test_without_an_admin_key_nobody_is_an_admin() -> None:
    async with serving(ScriptedEngine()) as client:
        for path in ("/server_info", "/server_info/"):
            assert_envelope(await client.get(path), status=403, code="admin_only", param=None)
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_browser_may_ask_without_a_key_and_sees_refusals() -> None:
    origin = {"origin": "https://chat.example"}
    preflight = origin | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-lang",
    }
    async with serving(ScriptedEngine(), api_key=("secret",), allowed_origins=("https://chat.example",)) as client:
        response = await client.options(PATH, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
        refused = await client.post(PATH, json=chat_body(), headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"
        elsewhere = await client.options(PATH, headers=preflight | {"origin": "https://evil.example"})
        assert elsewhere.status_code == 400


async def test_without_origins_no_page_may_call() -> None:
    async with serving(ScriptedEngine()) as client:
        response = await client.get("/v1/models", headers={"origin": "https://chat.example"})
    assert "access-control-allow-origin" not in response.headers
