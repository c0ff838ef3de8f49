"""`/openapi.json` says what is served: ranges are those that are checked, and every kind of reply is there."""

from __future__ import annotations

from typing import Any

import pytest

from server.schemas.sampling_fields import SamplingFields
from tests.builders.server import chat_body, serving
from tests.fakes import ScriptedEngine

PATH = "/v1/chat/completions"


def beyond(schema: dict[str, Any]) -> list[Any]:
    """Values just outside of the documented bounds."""
    values: list[Any] = []
    if "minimum" in schema:
        values.append(schema["minimum"] - 1)
    if "exclusiveMinimum" in schema:
        values.append(schema["exclusiveMinimum"])
    if "maximum" in schema:
        values.append(schema["maximum"] + 1)
    if "not" in schema:
        values.append(schema["not"]["const"])
    if schema.get("minItems") == 1:
        values.append([])
    return values


def at(schema: dict[str, Any]) -> list[Any]:
    """Values at the documented bounds, which are allowed."""
    return [schema[name] for name in ("minimum", "maximum") if name in schema]


PROPERTIES = SamplingFields.model_json_schema()["properties"]
BOUNDED = [name for name, schema in PROPERTIES.items() if beyond(schema)]


@pytest.mark.parametrize("name", BOUNDED)
async def test_the_documented_bounds_are_those_that_are_checked(name: str) -> None:
    schema = PROPERTIES[name]
    async with serving(ScriptedEngine()) as client:
        for value in beyond(schema):
            reply = await client.post(PATH, json=chat_body(**{name: value}))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), value
        for value in at(schema):
            reply = await client.post(PATH, json=chat_body(**{name: value}))
            assert reply.status_code == 200, (value, reply.text)


def test_many_fields_have_documented_bounds() -> None:
    assert {"temperature", "top_p", "min_p", "seed", "truncate_prompt_tokens"} <= set(BOUNDED)


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/invocations"])
async def test_what_can_be_streamed_is_documented_as_such(path: str) -> None:
    async with serving(ScriptedEngine()) as client:
        operation = (await client.get("/openapi.json")).json()["paths"][path]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert operation["requestBody"]["content"]["application/json"]["schema"]


async def test_invocations_take_either_body_and_need_no_model() -> None:
    async with serving(ScriptedEngine()) as client:
        operation = (await client.get("/openapi.json")).json()["paths"]["/invocations"]["post"]
    arms = operation["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert [arm["required"] for arm in arms] == [["messages"], ["prompt"]]


async def test_metrics_are_documented_as_text() -> None:
    async with serving(ScriptedEngine()) as client:
        described = (await client.get("/openapi.json")).json()["paths"]["/metrics"]["get"]
    assert list(described["responses"]["200"]["content"]) == ["text/plain"]
