"""The table and the JSON entry of one level, from made-up rounds."""

from __future__ import annotations

import json

from peagle.benchmark.client import open_client
from peagle.benchmark.counters import ServerCounters
from peagle.benchmark.load import Level, Target
from peagle.benchmark.metrics import RequestRecord, Round
from peagle.benchmark.report import build_report, format_tables


def counters(drafts: float, tokens: float, accepted: float) -> ServerCounters:
    return ServerCounters(
        num_drafts=drafts,
        num_draft_tokens=tokens,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=(accepted,),
        prefix_cache_queries=0.0,
        prefix_cache_hits=0.0,
    )


def level(name: str, *, slowness: float) -> Level:
    record = RequestRecord(
        started_s=0.0,
        finished_s=0.5 * slowness,
        chunk_times_s=(0.1 * slowness, 0.2 * slowness),
        prompt_tokens=3,
        completion_tokens=5,
        finish_reason="stop",
        text="same",
    )
    client = open_client("http://127.0.0.1:9/v1", api_key=None, max_connections=1)
    return Level(
        target=Target(name=name, client=client, model="m"),
        concurrency=4,
        rounds=[Round(records=(record,), wall_s=slowness, client_cpu_s=0.25 * slowness)],
        counters=[(counters(0, 0, 0), counters(2, 8, 3))],
    )


def test_a_row_holds_milliseconds_and_lines_up() -> None:
    header, row = format_tables([level("A", slowness=1.0)]).splitlines()
    assert len(header) == len(row)
    assert row.split() == [
        "A", "4", "1", "0", "5.0", "100.0/100.0/100.0", "25.0/25.0/25.0", "100.0/100.0/100.0", "500.0/500.0/500.0",
        "2.50", "2.50", "25%",
    ]  # fmt: skip


def test_two_servers_add_a_row_of_ratios() -> None:
    text = format_tables([level("A", slowness=1.0), level("B", slowness=2.0)])
    assert text.splitlines()[-1].split() == ["4", "2.00", "2.00", "0.50", "0.50", "0.50", "1", "of", "1"]


def test_the_json_keeps_seconds() -> None:
    report = json.loads(json.dumps(build_report([level("A", slowness=1.0)], provenance={"x": 1}, settings={})))
    (entry,) = report["levels"]
    assert entry["ttft_s"]["p50"] == 0.1
    assert entry["server_rates"]["acceptance_rate"] == 3 / 8
    assert report["provenance"] == {"x": 1}
