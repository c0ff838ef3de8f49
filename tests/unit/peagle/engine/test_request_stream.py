"""The queue of one request's outputs."""

from __future__ import annotations

import asyncio

import pytest

from peagle.engine.request_stream import RequestStream
from peagle.errors import EngineOverloadedError
from peagle.outputs import RequestOutput, Usage


def output(num_tokens: int) -> RequestOutput:
    usage = Usage(prompt_tokens=3, completion_tokens=num_tokens)
    return RequestOutput(request_id="x", text="a", token_ids=[num_tokens], finish_reason=None, usage=usage)


async def test_outputs_leave_in_the_order_in_which_they_came() -> None:
    stream = RequestStream(3)
    assert stream.usage == Usage(prompt_tokens=3, completion_tokens=0)
    waiting = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    for num_tokens in (1, 2):
        stream.put(output(num_tokens))
    assert await waiting == output(1)
    assert stream.usage.completion_tokens == 2, "of the latest, read or not"
    assert await stream.get() == output(2)


async def test_an_error_is_raised_in_its_turn() -> None:
    stream = RequestStream(3)
    stream.put(output(1))
    stream.put(EngineOverloadedError("full"))
    assert await stream.get() == output(1)
    with pytest.raises(EngineOverloadedError, match="full"):
        await stream.get()


async def test_a_closed_stream_keeps_nothing_and_wakes_whoever_waits() -> None:
    stream = RequestStream(3)
    waiting = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    stream.close()
    assert await waiting is None
    stream.put(output(1))
    assert await stream.get() is None
