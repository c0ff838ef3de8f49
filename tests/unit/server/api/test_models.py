"""GET /v1/models."""

from __future__ import annotations

import pytest

from tests.builders.server import MODEL, serving
from tests.fakes import ScriptedEngine
from tests.unit.server.test_bad_input import assert_envelope


async def test_every_name_is_listed() -> None:
    async with serving(ScriptedEngine(max_model_len=99), served_model_name=("small", "acme/other")) as client:
        body = (await client.get("/v1/models")).json()
        assert body["object"] == "list"
        assert [card["id"] for card in body["data"]] == ["small", "acme/other"]
        for card in body["data"]:
            assert (card["object"], card["root"], card["parent"], card["max_model_len"]) == ("model", MODEL, None, 99)
            assert (await client.get(f"/v1/models/{card['id']}")).json() == card


async def test_the_model_has_its_own_name_by_default() -> None:
    async with serving(ScriptedEngine()) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == [MODEL]
        assert (await client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
        assert (await client.get("/v1/models/acme%2Ftiny")).json()["id"] == MODEL


@pytest.mark.parametrize("name", ["gpt-9", "acme", "acme/tiny/x"])
async def test_another_name_is_not_found(name: str) -> None:
    async with serving(ScriptedEngine()) as client:
        assert_envelope(await client.get(f"/v1/models/{name}"), status=404, code="model_not_found", param="model")
