"""/metrics: names, labels and values, read back with the client library's own parser."""

from __future__ import annotations

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse_text

from peagle.stats import EngineStats, PrefixCacheStats, SpecDecodeStats
from tests.builders.server import MODEL, serving
from tests.fakes import ScriptedEngine

LABELS = {"model_name": MODEL, "engine": "0"}


def busy_stats() -> EngineStats:
    """A snapshot in which no two numbers are equal."""
    stats = EngineStats(
        num_running=3,
        num_waiting=5,
        kv_cache_usage=0.25,
        num_kv_blocks=64,
        block_size=16,
        prompt_tokens=1000,
        generation_tokens=2000,
        num_preemptions=7,
        prefix_cache=PrefixCacheStats(queries=900, hits=300),
        requests_by_reason={"stop": 11, "length": 12, "abort": 13, "error": 14},
        spec_decode=SpecDecodeStats(100, 400, 150, [80, 50, 15, 5]),
    )
    stats.time_to_first_token_s.observe(0.05)
    stats.time_to_first_token_s.observe(5000.0)
    stats.inter_token_latency_s.observe(0.002, times=4)
    stats.e2e_request_latency_s.observe(0.7)
    stats.queue_time_s.observe(1.0)
    return stats


async def scrape(stats: EngineStats) -> dict[str, Metric]:
    async with serving(ScriptedEngine(snapshot=stats)) as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    return {family.name: family for family in parse_text(response.text)}


def value(families: dict[str, Metric], sample_name: str, **labels: str) -> float:
    """The one sample with this name and exactly these labels beside the usual ones."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == sample_name and sample.labels == {**LABELS, **labels}
    ]
    assert len(found) == 1, (sample_name, labels, found)
    return float(found[0])


async def test_every_number_of_a_snapshot_is_exported() -> None:
    families = await scrape(busy_stats())
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 1000,
        "vllm:generation_tokens_total": 2000,
        "vllm:num_preemptions_total": 7,
        "vllm:prefix_cache_queries_total": 900,
        "vllm:prefix_cache_hits_total": 300,
        "vllm:spec_decode_num_drafts_total": 100,
        "vllm:spec_decode_num_draft_tokens_total": 400,
        "vllm:spec_decode_num_accepted_tokens_total": 150,
    }
    assert {name: value(families, name) for name in expected} == expected
    reasons = ("stop", "length", "abort", "error")
    assert [value(families, "vllm:request_success_total", finished_reason=r) for r in reasons] == [11, 12, 13, 14]
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(families, per_position, position=str(p)) for p in range(4)] == [80, 50, 15, 5]
    assert value(families, "vllm:cache_config_info", block_size="16", num_gpu_blocks="64") == 1


async def test_histograms_are_cumulative() -> None:
    families = await scrape(busy_stats())
    name = "vllm:time_to_first_token_seconds"
    assert families[name].type == "histogram"
    assert value(families, f"{name}_bucket", le="0.04") == 0
    assert value(families, f"{name}_bucket", le="0.06") == 1
    assert value(families, f"{name}_bucket", le="2560.0") == 1
    assert value(families, f"{name}_bucket", le="+Inf") == 2
    assert value(families, f"{name}_count") == 2
    assert value(families, f"{name}_sum") == 5000.05
    assert value(families, "vllm:inter_token_latency_seconds_count") == 4
    assert value(families, "vllm:e2e_request_latency_seconds_sum") == 0.7
    # an observation on a bound belongs to that bound's bucket
    assert value(families, "vllm:request_queue_time_seconds_bucket", le="1.0") == 1
    assert value(families, "vllm:request_queue_time_seconds_bucket", le="0.8") == 0


async def test_every_series_exists_before_anything_happened() -> None:
    families = await scrape(EngineStats(spec_decode=SpecDecodeStats.for_depth(3)))
    for reason in ("stop", "length", "abort", "error"):
        assert value(families, "vllm:request_success_total", finished_reason=reason) == 0
    for position in range(3):
        assert value(families, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == 0
    assert value(families, "vllm:inter_token_latency_seconds_count") == 0


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
        "text/plain;version=1.0.0",
        "*/*",
        "",
    ],
)
async def test_names_do_not_depend_on_the_scraper(accept: str) -> None:
    async with serving(ScriptedEngine(snapshot=busy_stats()), served_model_name=("small",)) as client:
        response = await client.get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in parse_text(response.text)}
    (sample,) = families["vllm:num_requests_running"].samples
    assert (sample.name, sample.labels) == ("vllm:num_requests_running", {"model_name": "small", "engine": "0"})


async def test_the_process_is_measured_too() -> None:
    assert (await scrape(EngineStats()))["process_resident_memory_bytes"].samples[0].value > 2**20
