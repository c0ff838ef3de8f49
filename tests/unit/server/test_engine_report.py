"""The log's lines about load and speculation."""

from __future__ import annotations

import asyncio
import logging

import pytest

from peagle.stats import EngineStats, PrefixCacheStats, SpecDecodeStats
from server.engine_report import EngineReport, has_news, report
from tests.builders.server import eventually, starter
from tests.fakes import ScriptedEngine


def test_rates_are_those_of_the_interval() -> None:
    before = EngineStats(prompt_tokens=100, generation_tokens=1000, prefix_cache=PrefixCacheStats(queries=50, hits=50))
    after = EngineStats(
        prompt_tokens=300,
        generation_tokens=1500,
        num_running=2,
        num_waiting=1,
        kv_cache_usage=0.25,
        prefix_cache=PrefixCacheStats(queries=150, hits=75),
    )
    assert report(before, after, seconds=10.0) == [
        "prompts 20.0 tokens/s, generation 50.0 tokens/s, running 2, waiting 1, KV cache 25.0%, prefix cache hits 25.0%"
    ]


def test_speculation_has_a_line_once_drafts_were_verified() -> None:
    before = EngineStats(spec_decode=SpecDecodeStats(10, 40, 20, [10, 6, 3, 1]))
    after = EngineStats(
        drafter="peagle+suffix",
        num_speculative_tokens=4,
        spec_decode=SpecDecodeStats(20, 70, 35, [18, 10, 5, 2]),
    )
    after.steps.num_verified_drafts.observe(3, times=10)
    (_, line) = report(before, after, seconds=1.0)
    assert line == (
        "speculation by peagle+suffix: 2.50 tokens a proposal, 50.0% of 30 drafts accepted, "
        "by position 0.80 0.40 0.20 0.10, K 3.0 of 4"
    )
    assert len(report(after, after, seconds=1.0)) == 1


def test_quotients_of_nothing_are_a_dash() -> None:
    (line,) = report(EngineStats(), EngineStats(), seconds=1.0)
    assert line.endswith("prefix cache hits -")


def test_an_idle_server_has_no_news() -> None:
    idle = EngineStats(num_steps=5)
    assert not has_news(idle, EngineStats(num_steps=5))
    assert has_news(idle, EngineStats(num_steps=6))
    assert has_news(idle, EngineStats(num_steps=5, num_waiting=1))


async def test_lines_come_on_time_and_end_with_stop(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(snapshot=EngineStats(num_running=1))
    bundle = starter(engine)(lambda phase, detail: None)
    written = EngineReport(lambda: bundle, interval_s=0.01)
    with caplog.at_level(logging.INFO, "server.engine_report"):
        written.start()
        await eventually(lambda: len(caplog.records) >= 2)
        written.stop()
        num_lines = len(caplog.records)
        await asyncio.sleep(0.05)
    assert len(caplog.records) == num_lines


async def test_an_interval_of_0_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bundle = starter(ScriptedEngine(snapshot=EngineStats(num_running=1)))(lambda phase, detail: None)
    silent = EngineReport(lambda: bundle, interval_s=0.0)
    with caplog.at_level(logging.INFO, "server.engine_report"):
        silent.start()
        await asyncio.sleep(0.02)
        silent.stop()
    assert caplog.records == []
