"""The wall clock of a machine jumps: nothing that waits, measures or limits goes by it."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from tests.builders.engine import engine_config, write_checkpoint
from tests.builders.server import DEADLINE_S, chat_body, engine_starter, live_server_of

DAY_S = 86_400.0


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_jump_in_mid_stream_is_not_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    directory = write_checkpoint(tmp_path / "tiny", max_position_embeddings=512)

    start = engine_starter(engine_config(directory, max_model_len=256, num_kv_blocks=256))
    options = {"heartbeat_timeout_s": 5.0, "queue_timeout_s": 5.0, "max_tokens_per_minute": 100_000}
    with live_server_of(start, **options) as server:
        real_time, real_time_ns = time.time, time.time_ns
        body = chat_body(max_tokens=100, ignore_eos=True, stream=True)
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE_S) as response:
            lines = response.iter_lines()
            next(lines)
            monkeypatch.setattr(time, "time", lambda: real_time() + jump_s)
            monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + int(jump_s * 1e9))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        after = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body(max_tokens=2), timeout=DEADLINE_S)
        assert after.status_code == 200
        assert abs(after.json()["created"] - (real_time() + jump_s)) < DEADLINE_S, "only what tells the time has moved"
        assert httpx.get(f"{server.url}/health").status_code == 200
        metrics = httpx.get(f"{server.url}/metrics").text
        sums = [line for line in metrics.splitlines() if "_seconds_sum" in line]
        assert sums
        assert all(0.0 <= float(line.rsplit(" ", 1)[1]) < 60.0 for line in sums), sums
