"""Metrics that are there before the engine is."""

from __future__ import annotations

import peagle
from tests.builders.server import build_app, eventually, is_loaded, started, starter
from tests.fakes import ScriptedEngine


async def test_the_status_is_that_of_ready() -> None:
    app = build_app(starter(ScriptedEngine()))
    registry = app.state.metrics_registry

    def status() -> set[str]:
        names = ("starting", "ready", "draining", "failed")
        return {name for name in names if registry.get_sample_value("peagle_status", {"status": name}) == 1}

    assert status() == {"starting"}
    async with started(app):
        await eventually(lambda: is_loaded(app))
        assert status() == {"ready"}
        assert registry.get_sample_value("peagle_startup_seconds", {"phase": "loading_target"}) >= 0
        assert registry.get_sample_value("peagle_requests_under_way") == 0
        app.state.lifecycle.begin_drain()
        assert status() == {"draining"}
    assert registry.get_sample_value("peagle_build_info", {"version": peagle.__version__}) == 1
