"""What the server says about its own speculation.

Owns reading `vllm:` counters from a Prometheus exposition and the rates between two readings. Refuses to judge them
against what the client saw. A server without these counters is fine: there is nothing to report then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

_SAMPLE = re.compile(r"^(vllm:\w+?)(?:_total)?(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, kw_only=True)
class ServerCounters:
    """One reading, summed over engines and models. Counts since the server's start."""

    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    num_accepted_tokens_per_pos: tuple[float, ...]
    prefix_cache_queries: float  # tokens
    prefix_cache_hits: float  # tokens


@dataclass(frozen=True, kw_only=True)
class ServerRates:
    """What happened between readings. A rate is None where nothing was counted."""

    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    acceptance_rate: float | None  # accepted / drafted tokens
    mean_acceptance_length: float | None  # tokens per target pass, the bonus token included: 1 + accepted / drafts
    acceptance_rate_per_pos: list[float]
    prefix_cache_hit_rate: float | None


def parse_counters(exposition: str) -> ServerCounters | None:
    """Read the counters from Prometheus text; None if it has no `vllm:spec_decode_*` counter."""
    totals: dict[str, float] = {}
    per_position: dict[int, float] = {}
    for name, labels, value in _SAMPLE.findall(exposition):
        position = _POSITION.search(labels)
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos" and position:
            index = int(position[1])
            per_position[index] = per_position.get(index, 0.0) + float(value)
        else:
            totals[name] = totals.get(name, 0.0) + float(value)
    if "vllm:spec_decode_num_drafts" not in totals:
        return None
    return ServerCounters(
        num_drafts=totals["vllm:spec_decode_num_drafts"],
        num_draft_tokens=totals.get("vllm:spec_decode_num_draft_tokens", 0.0),
        num_accepted_tokens=totals.get("vllm:spec_decode_num_accepted_tokens", 0.0),
        num_accepted_tokens_per_pos=tuple(per_position[index] for index in sorted(per_position)),
        prefix_cache_queries=totals.get("vllm:prefix_cache_queries", 0.0),
        prefix_cache_hits=totals.get("vllm:prefix_cache_hits", 0.0),
    )


def rates_between(readings: Sequence[tuple[ServerCounters | None, ServerCounters | None]]) -> ServerRates | None:
    """Rates over all (before, after) pairs; None if a reading is missing or the server restarted in between."""
    pairs = [
        (before, after) for before, after in readings if before and after and after.num_drafts >= before.num_drafts
    ]
    if not pairs or len(pairs) < len(readings):
        return None

    def growth(name: str) -> float:
        return float(sum(getattr(after, name) - getattr(before, name) for before, after in pairs))

    num_drafts, num_draft_tokens = growth("num_drafts"), growth("num_draft_tokens")
    num_accepted_tokens, queries = growth("num_accepted_tokens"), growth("prefix_cache_queries")
    depth = max(len(after.num_accepted_tokens_per_pos) for _, after in pairs)
    accepted_per_pos = [
        sum(_at(after, position) - _at(before, position) for before, after in pairs) for position in range(depth)
    ]
    return ServerRates(
        num_drafts=num_drafts,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        acceptance_rate=num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
        mean_acceptance_length=1 + num_accepted_tokens / num_drafts if num_drafts else None,
        acceptance_rate_per_pos=[accepted / num_drafts for accepted in accepted_per_pos] if num_drafts else [],
        prefix_cache_hit_rate=growth("prefix_cache_hits") / queries if queries else None,
    )


async def read_counters(client: httpx.AsyncClient, *, timeout_s: float) -> ServerCounters | None:
    """Fetch /metrics, which lives beside /v1; None if the server has no such page or no such counters."""
    url = client.base_url.join("../metrics")
    try:
        response = await client.get(url, timeout=timeout_s)
    except httpx.HTTPError:
        return None
    return parse_counters(response.text) if response.status_code == 200 else None


def _at(counters: ServerCounters, position: int) -> float:
    per_pos = counters.num_accepted_tokens_per_pos
    return per_pos[position] if position < len(per_pos) else 0.0
