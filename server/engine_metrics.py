"""The table of the engine's metrics: names, kinds, labels, meanings, and what is read for each.

Owns what is exported. Names that begin with `vllm:` are those of vLLM, with its labels and buckets: dashboards,
autoscalers and gateways read them as they are. What vLLM does not have begins with `peagle_`. docs/metrics.md is this
table. Refuses to know any format: `prometheus` and `metrics_page` write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from peagle import EngineHealth, EngineStats, FinishReason
from peagle.stats import Histogram

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scrape reads."""

    stats: EngineStats
    health: EngineHealth


Sample = tuple[tuple[str, ...], float | Histogram]  # values of the labels, value
Reading = Sequence[Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetric:
    """One metric.

    Attributes:
        name: without the `_total` that counters get on the wire.
        text: the help text.
        labels: beside `model_name` and `engine`.
        read: its values, each behind the values of `labels`.
        stands_for: the metric whose older name this is; dashboards should use that one.
    """

    name: str
    kind: Kind
    text: str
    read: Callable[[Snapshot], Reading]
    labels: tuple[str, ...] = ()
    stands_for: str | None = None


def _gauge(name: str, text: str, read: Callable[[EngineStats], float]) -> EngineMetric:
    return EngineMetric(name=name, kind="gauge", text=text, read=lambda s: [((), read(s.stats))])


def _counter(name: str, text: str, read: Callable[[EngineStats], float]) -> EngineMetric:
    return EngineMetric(name=name, kind="counter", text=text, read=lambda s: [((), read(s.stats))])


def _histogram(name: str, text: str, read: Callable[[EngineStats], Histogram]) -> EngineMetric:
    return EngineMetric(name=name, kind="histogram", text=text, read=lambda s: [((), read(s.stats))])


def _by_position(counts: list[int]) -> Reading:
    return [((str(position),), count) for position, count in enumerate(counts)]


def _waiting_by_reason(snapshot: Snapshot) -> Reading:
    return [(("capacity",), snapshot.stats.num_waiting), (("deferred",), 0)]


def _cache_config(snapshot: Snapshot) -> Reading:
    return [((str(snapshot.stats.block_size), str(snapshot.stats.num_kv_blocks)), 1)]


def _prompt_tokens_by_source(snapshot: Snapshot) -> Reading:
    cached = snapshot.stats.cached_prompt_tokens
    return [(("local_compute",), snapshot.stats.prompt_tokens - cached), (("local_cache_hit",), cached)]


def _ends(snapshot: Snapshot) -> Reading:
    counts = snapshot.stats.requests_by_reason
    return [((reason.value,), counts.get(reason.value, 0)) for reason in FinishReason]


def _drafter(snapshot: Snapshot) -> Reading:
    return [((snapshot.stats.drafter, str(snapshot.stats.num_speculative_tokens)), 1)]


def _step_seconds(snapshot: Snapshot) -> Reading:
    steps = snapshot.stats.steps
    return [(("verify",), steps.verify_s), (("draft",), steps.draft_s), (("host",), steps.host_s)]


def _graph_runs(snapshot: Snapshot) -> Reading:
    return [
        ((name, result), count)
        for name, graph in snapshot.stats.graphs.items()
        for result, count in (("hit", graph.hits), ("miss", graph.misses), ("eager", graph.eager))
    ]


_LOAD = (
    _gauge("vllm:num_requests_running", "Requests that are being computed.", lambda s: s.num_running),
    _gauge("vllm:num_requests_waiting", "Requests that wait to be computed.", lambda s: s.num_waiting),
    EngineMetric(
        name="vllm:num_requests_waiting_by_reason",
        kind="gauge",
        text="The same, by what they wait for; here it is always room to run.",
        labels=("reason",),
        read=_waiting_by_reason,
    ),
    _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1.", lambda s: s.kv_cache_usage),
    EngineMetric(
        name="vllm:cache_config_info",
        kind="gauge",
        text="The KV cache's shape, as labels of a constant 1.",
        labels=("block_size", "num_gpu_blocks"),
        read=_cache_config,
    ),
    _counter("vllm:num_preemptions", "Times a request gave up its KV cache for others.", lambda s: s.num_preemptions),
    _counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.prefix_cache.queries),
    _counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.prefix_cache.hits),
)
_REQUESTS = (
    _counter("vllm:prompt_tokens", "Prompt tokens of requests that have begun to run.", lambda s: s.prompt_tokens),
    _counter("vllm:prompt_tokens_cached", "Those that the prefix cache served.", lambda s: s.cached_prompt_tokens),
    EngineMetric(
        name="vllm:prompt_tokens_by_source",
        kind="counter",
        text="Prompt tokens, computed or served by the prefix cache.",
        labels=("source",),
        read=_prompt_tokens_by_source,
    ),
    _counter("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    EngineMetric(
        name="vllm:request_success",
        kind="counter",
        text="Finished requests, by the reason of their end.",
        labels=("finished_reason",),
        read=_ends,
    ),
    _counter(
        "vllm:corrupted_requests",
        "Requests whose hidden states or logits were no numbers; they end with an error.",
        lambda s: s.num_corrupted_requests,
    ),
    _histogram(
        "vllm:time_to_first_token_seconds", "From arrival to the first token.", lambda s: s.time_to_first_token_s
    ),
    _histogram(
        "vllm:inter_token_latency_seconds",
        "Between tokens; those of one step share its time.",
        lambda s: s.inter_token_latency_s,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Of one request, from its first token to its last, over the tokens after the first.",
        lambda s: s.requests.time_per_output_token_s,
    ),
    _histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", lambda s: s.e2e_request_latency_s),
    _histogram("vllm:request_queue_time_seconds", "From arrival to being computed.", lambda s: s.queue_time_s),
    _histogram(
        "vllm:request_inference_time_seconds",
        "From being computed to the end.",
        lambda s: s.requests.inference_time_s,
    ),
    _histogram(
        "vllm:request_prefill_time_seconds",
        "From being computed to the first token.",
        lambda s: s.requests.prefill_time_s,
    ),
    _histogram(
        "vllm:request_decode_time_seconds",
        "From the first token to the last.",
        lambda s: s.requests.decode_time_s,
    ),
    _histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", lambda s: s.requests.num_prompt_tokens),
    _histogram("vllm:request_generation_tokens", "Tokens of an answer.", lambda s: s.requests.num_generation_tokens),
    _histogram(
        "vllm:request_params_max_tokens",
        "The limit that a request asks for, if it does.",
        lambda s: s.requests.max_tokens,
    ),
    _histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Tokens of a prompt that the prefix cache did not have.",
        lambda s: s.requests.num_prefill_computed_tokens,
    ),
    _histogram(
        "vllm:request_num_preemptions",
        "How often a request gave up its KV cache.",
        lambda s: s.requests.num_preemptions,
    ),
)
_SPECULATION = (
    _counter("vllm:spec_decode_num_drafts", "Verified proposals of the drafter.", lambda s: s.spec_decode.num_drafts),
    _counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", lambda s: s.spec_decode.num_draft_tokens),
    _counter(
        "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda s: s.spec_decode.num_accepted_tokens
    ),
    EngineMetric(
        name="vllm:spec_decode_num_accepted_tokens_per_pos",
        kind="counter",
        text="Draft tokens accepted, by their position in the proposal.",
        labels=("position",),
        read=lambda s: _by_position(s.stats.spec_decode.num_accepted_tokens_per_pos),
    ),
    EngineMetric(
        name="peagle_spec_decode_num_draft_tokens_per_pos",
        kind="counter",
        text="Draft tokens verified, by their position in the proposal (in a tree: their depth).",
        labels=("position",),
        read=lambda s: _by_position(s.stats.spec_decode.num_draft_tokens_per_pos),
    ),
    _histogram(
        "peagle_request_acceptance_length",
        "Tokens that a verified proposal yielded, the one after the drafts included: the mean of a request.",
        lambda s: s.requests.acceptance_length,
    ),
    _histogram(
        "peagle_step_verified_drafts",
        "K as it was chosen: drafts that a step verified for a decoding sequence, 0 included.",
        lambda s: s.steps.num_verified_drafts,
    ),
    EngineMetric(
        name="peagle_drafter_info",
        kind="gauge",
        text="Who drafts, and the most drafts of a sequence and step, as labels of a constant 1.",
        labels=("drafter", "num_speculative_tokens"),
        read=_drafter,
    ),
    _gauge(
        "peagle_num_requests_with_draft_head",
        "Running requests that the draft head drafts for; fewer than run where it costs more than it brings.",
        lambda s: s.num_with_head,
    ),
)
_STEPS = (
    _histogram("vllm:iteration_tokens_total", "Tokens that a step computes.", lambda s: s.steps.num_tokens),
    _counter("peagle_engine_steps", "Steps.", lambda s: s.num_steps),
    EngineMetric(
        name="peagle_step_time_seconds",
        kind="histogram",
        text="Parts of a step: the target's pass with verification, drafting, and the rest on the host.",
        labels=("part",),
        read=_step_seconds,
    ),
    EngineMetric(
        name="peagle_graph_runs",
        kind="counter",
        text="Passes at fixed shapes: of a captured graph (hit), captured first (miss), or without any (eager).",
        labels=("graph", "result"),
        read=_graph_runs,
    ),
    EngineMetric(
        name="peagle_engine_alive",
        kind="gauge",
        text="1 while the engine's thread runs.",
        read=lambda s: [((), float(s.health.is_alive))],
    ),
    EngineMetric(
        name="peagle_engine_step_age_seconds",
        kind="gauge",
        text="The heartbeat: how long the step that runs has been running, or work has waited for one. 0 when idle.",
        read=lambda s: [((), s.health.step_age_s)],
    ),
)


def _alias(name: str, stands_for: str) -> EngineMetric:
    (metric,) = (metric for metric in (*_LOAD, *_REQUESTS) if metric.name == stands_for)
    return EngineMetric(
        name=name,
        kind=metric.kind,
        text=f"The older name of {stands_for}.",
        read=metric.read,
        labels=metric.labels,
        stands_for=stands_for,
    )


_ALIASES = (
    _alias("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
    _alias("vllm:gpu_prefix_cache_queries", "vllm:prefix_cache_queries"),
    _alias("vllm:gpu_prefix_cache_hits", "vllm:prefix_cache_hits"),
    _alias("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"),
)

ENGINE_METRICS: tuple[EngineMetric, ...] = (*_LOAD, *_REQUESTS, *_SPECULATION, *_STEPS, *_ALIASES)
