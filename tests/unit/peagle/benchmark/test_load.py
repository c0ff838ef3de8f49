"""The closed loop: how many are in flight, who is asked what, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from peagle.benchmark.client import open_client
from peagle.benchmark.load import Level, LoadPlan, Target, run_level
from peagle.benchmark.metrics import FailureKind
from peagle.benchmark.workload import GenerationSettings, Messages
from tests.unit.peagle.benchmark.chat_server import DONE, FINISH, Answer, ChatServer, chunk, usage


def asked(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


def echo(body: dict[str, Any]) -> Answer:
    """Answer with the question; later questions are answered faster, so that order has to be kept by index."""
    wait_s = 0.03 / (1 + body["seed"])
    return Answer(steps=[wait_s, chunk(asked(body)), FINISH, usage(1 + body["seed"]), DONE])


def prompts(count: int) -> list[Messages]:
    return [[{"role": "user", "content": f"question {index}"}] for index in range(count)]


def plan(count: int, *, num_rounds: int = 1, max_tokens: int = 64) -> LoadPlan:
    settings = GenerationSettings(max_tokens=max_tokens)
    return LoadPlan(prompts=prompts(count), settings=settings, timeout_s=10.0, num_rounds=num_rounds)


@contextmanager
def no_progress(title: str, total: int) -> Iterator[Callable[[], object]]:
    yield lambda: None


async def run(server: ChatServer, load_plan: LoadPlan, *, concurrency: int) -> Level:
    async with open_client(server.base_url, api_key=None, max_connections=concurrency) as client:
        target = Target(name="A", client=client, model="m")
        (level,) = await run_level(load_plan, [target], concurrency=concurrency, open_progress=no_progress)
        return level


@pytest.mark.parametrize("concurrency", [1, 3, 7])
async def test_as_many_in_flight_as_asked_for(concurrency: int) -> None:
    async with ChatServer(echo) as server:
        level = await run(server, plan(12), concurrency=concurrency)
    assert server.max_num_in_flight == concurrency
    (part,) = level.rounds
    assert [record.text for record in part.records] == [f"question {index}" for index in range(12)]
    assert [record.completion_tokens for record in part.records] == list(range(1, 13))
    assert part.failures == []


async def test_the_warm_up_is_short_and_not_measured() -> None:
    async with ChatServer(echo) as server:
        level = await run(server, plan(5), concurrency=3)
    assert len(level.rounds[0].warm_up) == 3
    assert len(level.rounds[0].records) == 5
    assert [body["max_tokens"] for body in server.log] == [16] * 3 + [64] * 5


async def test_the_warm_up_is_never_longer_than_an_answer() -> None:
    async with ChatServer(echo) as server:
        await run(server, plan(1, max_tokens=4), concurrency=1)
    assert [body["max_tokens"] for body in server.log] == [4, 4]


async def test_two_servers_take_turns_over_the_same_questions() -> None:
    titles: list[str] = []
    num_done = 0

    @contextmanager
    def count(title: str, total: int) -> Iterator[Callable[[], object]]:
        def after_each() -> None:
            nonlocal num_done
            num_done += 1

        titles.append(title)
        yield after_each

    def settled(server: ChatServer) -> list[dict[str, Any]]:
        return [{**body, "model": ""} for body in server.log]

    async with (
        ChatServer(echo) as a,
        ChatServer(echo) as b,
        open_client(a.base_url, api_key=None, max_connections=1) as client_a,
        open_client(b.base_url, api_key=None, max_connections=1) as client_b,
    ):
        targets = [Target(name="A", client=client_a, model="x"), Target(name="B", client=client_b, model="y")]
        levels = await run_level(plan(3, num_rounds=2), targets, concurrency=1, open_progress=count)
    assert [title.split()[0] for title in titles] == ["A", "B", "A", "B"]
    assert num_done == 12
    assert [len(level.rounds) for level in levels] == [2, 2]
    assert {body["model"] for body in a.log} == {"x"}
    assert {body["model"] for body in b.log} == {"y"}
    assert settled(a) == settled(b)
    in_turn = [levels[0].rounds[0], levels[1].rounds[0], levels[0].rounds[1], levels[1].rounds[1]]
    for earlier, later in pairwise(in_turn):
        assert earlier.records[-1].finished_s < later.records[0].started_s


async def test_a_refused_request_is_not_repeated_and_stops_nobody() -> None:
    def refuse_one(body: dict[str, Any]) -> Answer:
        return Answer(status=503, steps=[b"busy"]) if asked(body) == "question 2" else echo(body)

    async with ChatServer(refuse_one) as server:
        level = await run(server, plan(6), concurrency=2)
    (part,) = level.rounds
    failures = [None if record.failure is None else record.failure.kind for record in part.records]
    assert failures == [None, None, FailureKind.HTTP_STATUS, None, None, None]
    assert sum(asked(body) == "question 2" for body in server.log) == 1


async def test_counters_frame_the_measured_part_only() -> None:
    server = ChatServer(echo, metrics=lambda: f"vllm:spec_decode_num_drafts_total {len(server.log)}\n")
    async with server:
        level = await run(server, plan(5, num_rounds=2), concurrency=2)
    seen = [(before and before.num_drafts, after and after.num_drafts) for before, after in level.counters]
    assert seen == [(2, 7), (9, 14)]
