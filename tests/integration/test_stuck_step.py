"""A step of the real engine that does not end: /health says so, and says that it is well again afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.builders.async_engine import collect, running
from tests.builders.engine import make_engine, make_request, write_checkpoint
from tests.builders.server import eventually, serving

HEARTBEAT_S = 0.2


async def health(client: httpx.AsyncClient) -> int:
    return (await client.get("/health")).status_code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stuck") / "tiny")


async def test_a_step_that_hangs_makes_the_server_unhealthy_until_it_ends(checkpoint: Path) -> None:
    with running(make_engine(checkpoint)) as (engine, gate):
        async with serving(engine, heartbeat_timeout_s=HEARTBEAT_S) as client:
            assert await health(client) == 200
            await asyncio.sleep(1.5 * HEARTBEAT_S)  # an idle engine makes no steps, and is well
            assert await health(client) == 200
            gate.close()
            outputs = engine.generate(make_request("1", (1, 2, 3), max_tokens=2))
            await gate.holds()
            await eventually(lambda: engine.health().step_age_s > HEARTBEAT_S)
            response = await client.get("/health")
            assert response.status_code == 503
            assert "has not finished a step" in response.json()["error"]["message"]
            # Load balancers must not send more; the probes answer at once, though the engine is held.
            assert (await client.get("/metrics")).text.count("peagle_engine_step_age_seconds{") == 1
            gate.open()
            await collect(outputs)
            await eventually(lambda: engine.health().step_age_s == 0.0)
            assert await health(client) == 200
