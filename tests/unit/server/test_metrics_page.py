"""The fast writer of /metrics against prometheus_client's own, and the page's parts."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse_text

from peagle import EngineHealth
from peagle.stats import EngineStats, GraphStats, RequestStats, SpecDecodeStats, StepStats
from server.engine_metrics import ENGINE_METRICS, Snapshot
from server.metrics_page import MAX_PAGES_PER_S, EngineText, MetricsPage
from server.prometheus import engine_metrics
from tests.builders.server import starter
from tests.fakes import ScriptedEngine

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(families: list[Metric]) -> Samples:
    """Value of every sample by its name and labels; created times, which only one writer could have, are no samples."""
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = float(sample.value)
    return found


def random_stats(seed: int) -> EngineStats:
    rng = random.Random(seed)
    stats = EngineStats(
        num_running=rng.randrange(9),
        kv_cache_usage=rng.random(),
        drafter='odd "name"\\with\nall',
        num_speculative_tokens=4,
        prompt_tokens=rng.randrange(10**9),
        requests_by_reason={"stop": rng.randrange(99)},
        graphs={"target": GraphStats(hits=3, misses=2, eager=1)},
        spec_decode=SpecDecodeStats.for_depth(4),
        steps=StepStats.for_depth(4),
        requests=RequestStats.up_to(2048),
    )
    for _ in range(50):
        stats.time_to_first_token_s.observe(rng.expovariate(1.0))
        stats.inter_token_latency_s.observe(rng.expovariate(50.0), times=rng.randrange(1, 5))
        stats.requests.num_prompt_tokens.observe(rng.randrange(1, 4096))
        stats.steps.draft_s.observe(rng.expovariate(200.0))
        num_draft_tokens = rng.randrange(5)
        stats.spec_decode.observe(
            num_draft_tokens=num_draft_tokens, num_accepted_tokens=rng.randrange(num_draft_tokens + 1)
        )
    return stats


def test_both_writers_say_the_same() -> None:
    text = EngineText('m"\\\n')
    for seed in range(5):  # the same writer: what it keeps must not go stale
        snapshot = Snapshot(random_stats(seed), EngineHealth(is_alive=seed % 2 == 0, step_age_s=seed / 3))
        fast = samples(list(parse_text(text.render(snapshot))))
        slow = samples(list(engine_metrics(snapshot, model_name='m"\\\n')))
        assert fast == slow


def test_positions_that_appear_later_are_written() -> None:
    text = EngineText("m")
    health = EngineHealth(is_alive=True, step_age_s=0.0)
    name = "peagle_spec_decode_num_draft_tokens_per_pos_total{"
    assert name not in text.render(Snapshot(EngineStats(), health))
    grown = EngineStats(spec_decode=SpecDecodeStats.for_depth(3))
    assert text.render(Snapshot(grown, health)).count(name) == 3


def test_names_and_help_are_fit_for_use() -> None:
    names = [metric.name for metric in ENGINE_METRICS]
    assert len(set(names)) == len(names)
    for metric in ENGINE_METRICS:
        assert metric.name.startswith(("vllm:", "peagle_"))
        assert metric.text.endswith(".")
        assert "\n" not in metric.text


def test_the_engine_is_left_out_until_there_is_one() -> None:
    engine = ScriptedEngine()
    bundles = [None, starter(engine)(lambda phase, detail: None)]
    page = MetricsPage(
        CollectorRegistry(), get_bundle=lambda: bundles[0], get_model_name=lambda bundle: bundle.model_id.upper()
    )
    assert page.render() == b""
    bundles.pop(0)
    assert b'model_name="ACME/TINY"' in page.render()


def test_a_page_is_made_twice_a_second_at_most() -> None:
    registry = CollectorRegistry()
    counter = Counter("asked", "Times.", registry=registry)
    now = [0.0]
    page = MetricsPage(registry, get_bundle=lambda: None, get_model_name=lambda bundle: "m", clock=lambda: now[0])
    seen = []
    for step in range(100):  # five seconds, twenty times each
        now[0] = step * 0.05
        counter.inc()
        seen.append(page.render())
    assert len(set(seen)) == 5 * MAX_PAGES_PER_S
    assert b"asked_total 2.0" in seen[1], "the first few are made at once"
    now[0] += 10.0
    counter.inc()
    assert b"asked_total 101.0" in page.render()
