"""Speculation counters, read from real Prometheus text."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from peagle.benchmark.client import open_client
from peagle.benchmark.counters import ServerCounters, parse_counters, rates_between, read_counters
from tests.unit.peagle.benchmark.chat_server import ChatServer


class Exposition:
    """Two engines of a server, counting with the real client library."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"vllm:{name}", name, ["model_name", "engine"], registry=self.registry)
            for name in (
                "spec_decode_num_drafts",
                "spec_decode_num_draft_tokens",
                "spec_decode_num_accepted_tokens",
                "prefix_cache_queries",
                "prefix_cache_hits",
            )
        }
        self._per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "x", ["position", "engine"], registry=self.registry
        )
        Histogram("vllm:time_to_first_token_seconds", "x", registry=self.registry).observe(1.0)

    def add(self, engine: str, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._counters[name].labels(model_name='a}b "c"', engine=engine).inc(amount)

    def add_at(self, position: int, amount: float, *, engine: str = "0") -> None:
        self._per_position.labels(position=str(position), engine=engine).inc(amount)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def counters(drafts: float, tokens: float, accepted: float, *per_pos: float) -> ServerCounters:
    return ServerCounters(
        num_drafts=drafts,
        num_draft_tokens=tokens,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=per_pos,
        prefix_cache_queries=0.0,
        prefix_cache_hits=0.0,
    )


def filled_exposition() -> Exposition:
    exposition = Exposition()
    exposition.add("0", spec_decode_num_drafts=10, spec_decode_num_draft_tokens=30, spec_decode_num_accepted_tokens=12)
    exposition.add("1", spec_decode_num_drafts=5, spec_decode_num_draft_tokens=15, spec_decode_num_accepted_tokens=3)
    exposition.add("0", prefix_cache_queries=100, prefix_cache_hits=25)
    exposition.add_at(0, 9)
    exposition.add_at(1, 4)
    exposition.add_at(0, 2, engine="1")
    exposition.add_at(10, 0)
    return exposition


def test_engines_are_summed_and_positions_kept_apart() -> None:
    assert parse_counters(filled_exposition().text()) == ServerCounters(
        num_drafts=15,
        num_draft_tokens=45,
        num_accepted_tokens=15,
        num_accepted_tokens_per_pos=(11, 4, 0),
        prefix_cache_queries=100,
        prefix_cache_hits=25,
    )


@pytest.mark.parametrize(
    "text", ["", "<html>", "vllm:num_requests_running 3\n", "# HELP vllm:spec_decode_num_drafts x\n"]
)
def test_a_page_without_the_counters(text: str) -> None:
    assert parse_counters(text) is None


def test_rates_are_of_what_happened_in_between() -> None:
    rates = rates_between(
        [
            (counters(100, 400, 150, 100, 50), counters(110, 440, 162, 108, 54)),
            (counters(200, 800, 300, 200, 100), counters(210, 840, 308, 206, 102)),
        ]
    )
    assert rates is not None
    assert (rates.num_drafts, rates.num_draft_tokens, rates.num_accepted_tokens) == (20, 80, 20)
    assert rates.acceptance_rate == 0.25
    assert rates.mean_acceptance_length == 2.0
    assert rates.acceptance_rate_per_pos == [0.7, 0.3]
    assert rates.prefix_cache_hit_rate is None


def test_no_drafts_no_rates() -> None:
    rates = rates_between([(counters(7, 28, 3), counters(7, 28, 3))])
    assert rates is not None
    assert (rates.acceptance_rate, rates.mean_acceptance_length, rates.acceptance_rate_per_pos) == (None, None, [])


def test_positions_that_appear_later_count_from_zero() -> None:
    rates = rates_between([(counters(0, 0, 0), counters(4, 8, 3, 2, 1))])
    assert rates is not None
    assert rates.acceptance_rate_per_pos == [0.5, 0.25]


def test_a_restart_or_a_missing_reading_leaves_nothing_to_say() -> None:
    assert rates_between([]) is None
    assert rates_between([(None, counters(1, 1, 1))]) is None
    assert rates_between([(counters(0, 0, 0), counters(4, 8, 3)), (counters(9, 9, 9), counters(1, 1, 1))]) is None


async def test_the_page_lies_beside_v1() -> None:
    exposition = filled_exposition()
    async with (
        ChatServer(metrics=exposition.text) as server,
        open_client(server.base_url, api_key=None, max_connections=1) as client,
    ):
        assert await read_counters(client, timeout_s=5.0) == parse_counters(exposition.text())


async def test_no_such_page() -> None:
    async with ChatServer() as server, open_client(server.base_url, api_key=None, max_connections=1) as client:
        assert await read_counters(client, timeout_s=5.0) is None
    async with open_client(server.base_url, api_key=None, max_connections=1) as client:
        assert await read_counters(client, timeout_s=5.0) is None
