"""What is counted of HTTP, and under which labels."""

from __future__ import annotations

from fastapi import FastAPI

from peagle.errors import EngineOverloadedError
from tests.builders.server import build_app, chat_body, eventually, is_loaded, started, starter
from tests.fakes import ScriptedEngine

PATH = "/v1/chat/completions"


def count(app: FastAPI, name: str, **labels: str) -> float | None:
    value: float | None = app.state.metrics_registry.get_sample_value(name, labels)
    return value


async def test_requests_are_counted_by_route_and_kind_of_status() -> None:
    app = build_app(starter(ScriptedEngine()))
    async with started(app) as client:
        await eventually(lambda: is_loaded(app))
        await client.post(PATH, json=chat_body())
        await client.post(PATH, json={"model": 3})
        await client.get("/v1/models/acme/tiny")
        for path in ("/no/such/path", "/another", "/health", "/ready", "/metrics"):
            await client.get(path)
        await client.request("BREW", "/no/such/path")
    requests = "http_requests_total"
    assert count(app, requests, method="POST", handler=PATH, status="2xx") == 1
    assert count(app, requests, method="POST", handler=PATH, status="4xx") == 1
    assert count(app, requests, method="GET", handler="/v1/models/{name:path}", status="2xx") == 1
    assert count(app, requests, method="GET", handler="none", status="4xx") == 2
    assert count(app, requests, method="other", handler="none", status="4xx") == 1
    assert count(app, requests, method="GET", handler="/health", status="2xx") is None
    assert count(app, "http_request_duration_seconds_count", method="POST", handler=PATH) == 2


async def test_refusals_are_counted_by_their_code() -> None:
    engine = ScriptedEngine(refusal=EngineOverloadedError("full"))
    app = build_app(starter(engine))
    async with started(app) as client:
        await eventually(lambda: is_loaded(app))
        assert count(app, "vllm:admission_rejections_total", reason="server_overloaded") == 0
        assert (await client.post(PATH, json=chat_body())).status_code == 503
    assert count(app, "vllm:admission_rejections_total", reason="server_overloaded") == 1
    assert count(app, "vllm:admission_rejections_total", reason="model_loading") == 0
