"""The result for people (a table) and for machines (one JSON object).

Owns output formats and writing them. Refuses to compute: numbers come from `metrics` and `counters`. Seconds become
milliseconds only in the table.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.benchmark.counters import ServerRates, rates_between
from peagle.benchmark.load import Level
from peagle.benchmark.metrics import Comparison, Distribution, LoadSummary, compare, summarize

MAX_FAILURE_EXAMPLES = 10
LEVEL_COLUMNS = (
    "server", "conc", "requests", "failed", "tok/s", "TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99",
    "chunk gap ms p50/p90/p99", "E2E ms p50/p90/p99", "tok/chunk", "accept len", "client CPU",
)  # fmt: skip
RATIO_COLUMNS = ("conc", "tok/s A/B", "per round", "TTFT p50 A/B", "TPOT p50 A/B", "E2E p50 A/B", "equal outputs")


def build_report(
    levels: Sequence[Level], *, provenance: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything in one JSON-ready dict. With two servers, `comparisons` holds the ratios per concurrency."""
    failures = [
        {"server": level.target.name, "concurrency": level.concurrency, "kind": failure.kind, "detail": failure.detail}
        for level in levels
        for part in level.rounds
        for failure in part.failures
    ]
    targets = {level.target.name: level.target for level in levels}
    return {
        "benchmark": "chat completions, streamed, closed loop",
        "definitions": {
            "tokens_per_s": "completion tokens by usage / wall time",
            "tpot_s": "(last - first chunk with text) / (completion tokens by usage - 1), per request",
            "percentiles": "linear interpolation between nearest ranks",
        },
        "provenance": dict(provenance),
        "settings": dict(settings),
        "servers": {
            name: {"base_url": str(target.client.base_url), "model": target.model} for name, target in targets.items()
        },
        "levels": [_level_entry(level) for level in levels],
        "comparisons": [asdict(comparison) for comparison in _comparisons(levels)],
        "failures": {
            "total": len(failures),
            "by_kind": dict(Counter(str(failure["kind"]) for failure in failures)),
            "examples": failures[:MAX_FAILURE_EXAMPLES],
        },
    }


def format_tables(levels: Sequence[Level]) -> str:
    """One row per server and concurrency; then, with two servers, one row of ratios per concurrency."""
    rows = [_level_row(level, summarize(level.rounds), rates_between(level.counters)) for level in levels]
    text = _align([LEVEL_COLUMNS, *rows])
    comparisons = _comparisons(levels)
    if comparisons:
        text += "\n" + _align([RATIO_COLUMNS, *(_ratio_row(comparison) for comparison in comparisons)])
    return text


def write_report(levels: Sequence[Level], report: Mapping[str, Any], *, output: Path | None) -> None:
    """Tables and the failures by name, then the JSON as the last line of stdout; and indented to `output`."""
    failures = report["failures"]
    lines = [format_tables(levels)]
    if failures["total"]:
        counts = ", ".join(f"{kind} {count}" for kind, count in failures["by_kind"].items())
        lines.append(f"{failures['total']} failed: {counts}; first: {failures['examples'][0]['detail']}\n")
    sys.stdout.write("\n".join(lines) + "\n" + json.dumps(report) + "\n")
    sys.stdout.flush()
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _level_entry(level: Level) -> dict[str, Any]:
    rates = rates_between(level.counters)
    return {
        "server": level.target.name,
        "concurrency": level.concurrency,
        **asdict(summarize(level.rounds)),
        "server_rates": asdict(rates) if rates else None,
    }


def _comparisons(levels: Sequence[Level]) -> list[Comparison]:
    by_concurrency: dict[int, list[Level]] = {}
    for level in levels:
        by_concurrency.setdefault(level.concurrency, []).append(level)
    return [
        compare(pair[0].rounds, pair[1].rounds, concurrency=concurrency)
        for concurrency, pair in by_concurrency.items()
        if len(pair) == 2
    ]


def _level_row(level: Level, summary: LoadSummary, rates: ServerRates | None) -> tuple[str, ...]:
    return (
        level.target.name,
        str(level.concurrency),
        str(summary.num_requests),
        str(summary.num_failed + summary.num_warm_up_failed),
        f"{summary.tokens_per_s:.1f}",
        _milliseconds(summary.ttft_s),
        _milliseconds(summary.tpot_s),
        _milliseconds(summary.inter_chunk_s),
        _milliseconds(summary.e2e_s),
        _number(summary.tokens_per_chunk),
        _number(rates.mean_acceptance_length if rates else None),
        f"{summary.client_cpu_share:.0%}",
    )


def _ratio_row(comparison: Comparison) -> tuple[str, ...]:
    return (
        str(comparison.concurrency),
        _number(comparison.tokens_per_s_ratio),
        " ".join(_number(ratio) for ratio in comparison.tokens_per_s_ratio_by_round),
        _number(comparison.ttft_p50_ratio),
        _number(comparison.tpot_p50_ratio),
        _number(comparison.e2e_p50_ratio),
        f"{comparison.num_equal_outputs} of {comparison.num_compared_outputs}",
    )


def _milliseconds(distribution: Distribution | None) -> str:
    if distribution is None:
        return "-"
    return "/".join(f"{value * 1000:.1f}" for value in (distribution.p50, distribution.p90, distribution.p99))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + "\n" for row in rows)
