"""A closed loop: as many workers as the concurrency, each asking again as soon as it has its answer.

Owns rounds and their order. Refuses to know output formats. A closed loop finds saturation throughput; it says nothing
about latency at a given arrival rate, because a slow server slows the questions down too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

import httpx

from peagle.benchmark.client import stream_chat
from peagle.benchmark.counters import ServerCounters, read_counters
from peagle.benchmark.metrics import RequestRecord, Round
from peagle.benchmark.workload import GenerationSettings, Messages, built_in_prompts

WARM_UP_MAX_TOKENS = 16
METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """One server under measurement."""

    name: str
    client: httpx.AsyncClient
    model: str


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What every round does, whichever server and concurrency it has."""

    prompts: Sequence[Messages]
    settings: GenerationSettings
    timeout_s: float
    num_rounds: int = 1


@dataclass(kw_only=True)
class Level:
    """All rounds of one server at one concurrency, each with the server's counters before and after it."""

    target: Target
    concurrency: int
    rounds: list[Round] = field(default_factory=list)
    counters: list[tuple[ServerCounters | None, ServerCounters | None]] = field(default_factory=list)


# Given a title and the number of requests; hands out what to call after each of them, and is left at the round's end.
ProgressFactory = Callable[[str, int], AbstractContextManager[Callable[[], object]]]


async def run_level(
    plan: LoadPlan, targets: Sequence[Target], *, concurrency: int, open_progress: ProgressFactory
) -> list[Level]:
    """Measure all targets at one concurrency. Rounds take turns (A, B, A, B, ...), so that a machine that slows down
    half-way slows both.
    """
    levels = [Level(target=target, concurrency=concurrency) for target in targets]
    for number in range(1, plan.num_rounds + 1):
        for level in levels:
            title = f"{level.target.name} concurrency {concurrency} round {number}/{plan.num_rounds}"
            with open_progress(title, len(plan.prompts)) as after_each:
                await _run_round(plan, level, after_each=after_each)
    return levels


async def _run_round(plan: LoadPlan, level: Level, *, after_each: Callable[[], object]) -> None:
    target = level.target
    warm_up = await _ask_all(plan, level, _warm_up_bodies(plan, level), after_each=lambda: None)
    before = await read_counters(target.client, timeout_s=METRICS_TIMEOUT_S)
    bodies = [plan.settings.body(prompt, model=target.model, index=index) for index, prompt in enumerate(plan.prompts)]
    started_s, started_cpu_s = perf_counter(), process_time()
    records = await _ask_all(plan, level, bodies, after_each=after_each)
    wall_s, client_cpu_s = perf_counter() - started_s, process_time() - started_cpu_s
    after = await read_counters(target.client, timeout_s=METRICS_TIMEOUT_S)
    level.counters.append((before, after))
    level.rounds.append(Round(records=records, warm_up=warm_up, wall_s=wall_s, client_cpu_s=client_cpu_s))


def _warm_up_bodies(plan: LoadPlan, level: Level) -> list[dict[str, Any]]:
    """One short question per worker: opens the connections and lets the server meet this batch size."""
    prompts = built_in_prompts()
    bodies = [
        plan.settings.body(prompts[index % len(prompts)], model=level.target.model, index=index)
        for index in range(level.concurrency)
    ]
    return [{**body, "max_tokens": min(WARM_UP_MAX_TOKENS, plan.settings.max_tokens)} for body in bodies]


async def _ask_all(
    plan: LoadPlan, level: Level, bodies: Sequence[dict[str, Any]], *, after_each: Callable[[], object]
) -> tuple[RequestRecord, ...]:
    """Ask everything with `level.concurrency` workers; the records come in the order of `bodies`."""
    waiting = iter(enumerate(bodies))
    records: dict[int, RequestRecord] = {}

    async def work() -> None:
        for index, body in waiting:
            records[index] = await stream_chat(level.target.client, body, timeout_s=plan.timeout_s)
            after_each()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(level.concurrency, len(bodies))):
            group.create_task(work())
    return tuple(records[index] for index in range(len(bodies)))
