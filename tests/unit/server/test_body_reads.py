"""Waiting for a body: until its bytes come, the deadline, or a drain."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from server.body_reads import BodyReads
from server.errors import RequestTimeoutError, ShuttingDownError
from tests.builders.server import DEADLINE_S

PART: Message = {"type": "http.request", "body": b"x", "more_body": True}


async def at_once() -> Message:
    return PART


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_what_comes_in_time_is_passed_on() -> None:
    reads = BodyReads(timeout_s=DEADLINE_S)

    async def soon() -> Message:
        await asyncio.sleep(0.01)
        return PART

    async def gone() -> Message:
        raise ClientDisconnect

    assert await reads.receive(at_once) is PART
    assert await reads.receive(soon) is PART
    with pytest.raises(ClientDisconnect):
        await reads.receive(gone)


async def test_each_part_has_a_deadline_of_its_own() -> None:
    reads = BodyReads(timeout_s=1.0)

    async def slowly() -> Message:
        await asyncio.sleep(0.3)
        return PART

    for _ in range(5):
        assert await reads.receive(slowly) is PART
    with pytest.raises(RequestTimeoutError, match=r"for 1 s"):
        await reads.receive(never)


async def test_a_drain_ends_every_wait_and_those_to_come() -> None:
    reads = BodyReads(timeout_s=3600.0)
    waits = [asyncio.create_task(reads.receive(never)) for _ in range(3)]
    await asyncio.sleep(0)
    reads.end()
    reads.end()
    results = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), DEADLINE_S)
    assert [type(result) for result in results] == [ShuttingDownError] * 3
    with pytest.raises(ShuttingDownError):
        await asyncio.wait_for(reads.receive(never), DEADLINE_S)
    assert await reads.receive(at_once) is PART  # what is there already can be read
    reads.end()


async def test_a_cancelled_wait_stays_cancelled() -> None:
    reads = BodyReads(timeout_s=3600.0)
    wait = asyncio.create_task(reads.receive(never))
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    reads.end()
