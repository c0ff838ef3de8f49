"""/health, /ready and /version, from the first moment to the last."""

from __future__ import annotations

import threading

from peagle.engine.interface import EnginePhase, PhaseListener
from peagle.errors import ModelLoadError
from server.engine_bundle import EngineBundle
from tests.builders.server import build_app, chat_body, eventually, is_loaded, serving, started, starter
from tests.fakes import ScriptedEngine
from tests.unit.server.test_bad_input import assert_envelope


async def test_answers_while_loading() -> None:
    may_load, has_begun = threading.Event(), threading.Event()

    def start(on_phase: PhaseListener) -> EngineBundle:
        on_phase(EnginePhase.LOADING_TARGET, "reading /models/secret/tiny.safetensors")
        has_begun.set()
        may_load.wait()
        return starter(ScriptedEngine())(on_phase)

    app = build_app(start)
    async with started(app) as client:
        await eventually(has_begun.is_set)
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
        assert ready.status_code == 503
        body = ready.json()
        assert body.pop("elapsed_s") >= 0
        assert list(body.pop("phase_seconds")) == ["starting"]
        assert body == {"status": "starting", "phase": "loading_target", "detail": "reading tiny.safetensors"}
        assert "vllm:num_requests_running" not in (await client.get("/metrics")).text  # there is no engine to count
        for response in (
            await client.get("/v1/models"),
            await client.post("/v1/chat/completions", json=chat_body()),
            await client.post("/v1/chat/completions", content=b"not JSON"),
        ):
            assert_envelope(response, status=503, code="model_loading", param=None)
            assert float(response.headers["retry-after"]) > 0
        may_load.set()
        await eventually(lambda: is_loaded(app))
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["status"], ready.json()["phase"]) == (200, "ready", "ready")


async def test_health_is_an_empty_object() -> None:
    async with serving(ScriptedEngine()) as client:
        response = await client.get("/health")
        assert (response.status_code, response.json()) == (200, {})
        assert "version" in (await client.get("/version")).json()


async def test_a_failed_load_is_told() -> None:
    def start(on_phase: PhaseListener) -> EngineBundle:
        raise ModelLoadError("/models/secret/config.json has no 'model_type'")

    app = build_app(start)
    async with started(app) as client:
        await eventually(lambda: app.state.lifecycle.is_failed)
        body = (await client.get("/ready")).json()
        assert (body["status"], body["phase"]) == ("failed", "failed")
        assert body["detail"] == "config.json has no 'model_type'"
        assert_envelope(await client.get("/health"), status=503, code="unhealthy", param=None)
        response = await client.post("/v1/chat/completions", json=chat_body())
        assert_envelope(response, status=500, code="model_load_failed", param=None)


async def test_an_unexpected_failure_to_load_keeps_its_text_to_the_log() -> None:
    def start(on_phase: PhaseListener) -> EngineBundle:
        raise RuntimeError("secret")

    app = build_app(start)
    async with started(app) as client:
        await eventually(lambda: app.state.lifecycle.is_failed)
        assert (await client.get("/ready")).json()[
            "detail"
        ] == "unexpected RuntimeError; the server's log has the details"


async def test_a_dead_engine() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        engine.is_alive = False
        assert_envelope(await client.get("/health"), status=503, code="unhealthy", param=None)
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["status"], ready.json()["phase"]) == (503, "failed", "stopped")
        response = await client.post("/v1/chat/completions", json=chat_body())
        assert_envelope(response, status=500, code="engine_dead", param=None)


async def test_a_stuck_engine() -> None:
    engine = ScriptedEngine()
    async with serving(engine, heartbeat_timeout_s=10.0) as client:
        engine.step_age_s = 10.0
        assert (await client.get("/health")).status_code == 200
        engine.step_age_s = 10.5
        assert_envelope(await client.get("/health"), status=503, code="unhealthy", param=None)
