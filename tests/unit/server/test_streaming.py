"""The wire shape of a stream, event by event, and the comments of an idle one."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope

from peagle.outputs import RequestOutput, Usage
from peagle.sequence import FinishReason
from server.chat_answers import ChatChunks
from server.fan_out import ChoiceOutput
from server.generation import Generation
from server.schemas.chat import ChatCompletionRequest
from server.sse import DONE, KEEP_ALIVE
from server.streaming import KeepAlive
from tests.builders.server import (
    DEADLINE_S,
    MODEL,
    build_app,
    chat_body,
    eventually,
    is_loaded,
    serving,
    started,
    starter,
)
from tests.fakes import Say, ScriptedEngine

PATH = "/v1/chat/completions"


def events_of(text: str) -> list[dict[str, Any]]:
    """The parsed events of a stream that ends as it should."""
    assert text.endswith("\n\n")
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [orjson.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_from_role_to_done(include_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    engine = ScriptedEngine(cached_tokens=16, finish_reason=FinishReason.LENGTH)
    async with serving(engine) as client:
        response = await client.post(PATH, json=chat_body(stream=True, **options))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    events = events_of(response.text)
    heads = {(event["id"], event["object"], event["created"], event["model"]) for event in events}
    ((request_id, kind, _, model),) = heads
    assert (request_id, kind, model) == (engine.requests[0].request_id, "chat.completion.chunk", MODEL)
    if include_usage:
        last = events.pop()
        num_prompt_tokens = len(engine.requests[0].prompt_token_ids)
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 5,
            "total_tokens": num_prompt_tokens + 5,
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }
        assert all(event["usage"] is None for event in events)
    else:
        assert all("usage" not in event for event in events)
    choices = [event["choices"] for event in events]
    assert all(len(choice) == 1 and choice[0]["index"] == 0 for choice in choices)
    assert [choice[0]["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hello"},
        {"content": " wor"},
        {"content": "ld"},
        {},
    ]
    assert [choice[0]["finish_reason"] for choice in choices] == [None, None, None, None, "length"]
    assert all(choice[0]["logprobs"] is None for choice in choices)


def output(text: str, *, finish_reason: FinishReason | None = None) -> ChoiceOutput:
    return ChoiceOutput(
        choices=(0,),
        prompt_index=0,
        output=RequestOutput(
            request_id="r",
            text=text,
            token_ids=[1],
            finish_reason=finish_reason,
            usage=Usage(prompt_tokens=2, completion_tokens=3),
        ),
    )


def chat_chunks() -> ChatChunks:
    """Of a generation that is only written, never run."""
    nothing = cast(Any, None)
    body = ChatCompletionRequest.model_validate(chat_body(stream=True))
    generation = Generation(
        request_id="r",
        model="m",
        created=1,
        prompts=[[1, 2]],
        num_choices=1,
        members=[],
        outputs=nothing,
        bundle=nothing,
        lifecycle=nothing,
    )
    return ChatChunks(body, generation)


@given(st.lists(st.text(), max_size=8), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
def test_chunks_put_together_are_the_answer(texts: Sequence[str], reason: FinishReason) -> None:
    encoder = chat_chunks()
    outputs = [output(text) for text in texts] + [output("end", finish_reason=reason)]
    wire = [encoder.encode(item) for item in outputs]
    # held-back text sends nothing
    assert [bool(events) for events in wire] == [bool(item.output.text) for item in outputs]
    assert encoder.end() == DONE
    deltas = [event["choices"][0]["delta"] for event in events_of((b"".join(wire) + DONE).decode())]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta.get("content", "") for delta in deltas) == "".join(texts) + "end"
    assert sum("role" in delta for delta in deltas) == 1


async def test_an_idle_stream_is_kept_alive_and_a_busy_one_is_not() -> None:
    sent: list[bytes] = []
    is_third = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message["body"])
        if len(sent) >= 3:
            is_third.set()

    keep_alive = KeepAlive(send, interval_s=0.01)
    await asyncio.wait_for(is_third.wait(), 10)
    keep_alive.stop()
    assert set(sent) == {KEEP_ALIVE}
    num_sent = len(sent)
    await asyncio.sleep(0.05)
    assert len(sent) == num_sent
    never = KeepAlive(send, interval_s=0)
    await asyncio.sleep(0.05)
    never.stop()
    assert len(sent) == num_sent


async def test_a_client_that_reads_nothing_gets_no_pile_of_comments() -> None:
    num_started = 0

    async def send(message: Any) -> None:
        nonlocal num_started
        num_started += 1
        await asyncio.Event().wait()  # the client's window is full

    keep_alive = KeepAlive(send, interval_s=0.001)
    await asyncio.sleep(0.05)
    keep_alive.stop()
    assert num_started == 1


async def test_comments_come_between_the_events() -> None:
    engine = ScriptedEngine(script=[Say("a", delay_s=0.1), Say("b", delay_s=0.1)])
    async with serving(engine, keep_alive_s=0.02) as client:
        response = await client.post(PATH, json=chat_body(stream=True))
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    assert blocks[0] == ": keep-alive"  # already while the first token is awaited
    assert blocks[-1] == "data: [DONE]"
    without_comments = "".join(f"{block}\n\n" for block in blocks if not block.startswith(":"))
    deltas = [event["choices"][0]["delta"].get("content") for event in events_of(without_comments)]
    assert deltas == ["", "a", "b", None]


async def test_a_client_that_leaves_in_mid_stream_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(script=[Say("x", forever=True)])
    app = build_app(starter(engine))
    num_sent = 0

    async def receive() -> Message:
        if num_sent:
            await asyncio.Event().wait()  # the write notices first that nobody is there
        return {"type": "http.request", "body": orjson.dumps(chat_body(stream=True)), "more_body": False}

    async def send(_message: Message) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent > 3:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    headers = [(b"content-type", b"application/json")]
    scope: Scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b""}
    with caplog.at_level(logging.INFO):
        async with started(app):
            await eventually(lambda: is_loaded(app))
            await asyncio.wait_for(app(scope, receive, send), DEADLINE_S)
    assert num_sent == 4  # a write that failed is not followed by another
    assert " 499 " in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert len(engine.ended_early) == 1


async def test_a_comment_to_a_gone_client_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    is_tried = asyncio.Event()

    async def send(_message: Any) -> None:
        is_tried.set()
        raise ClientDisconnect

    keep_alive = KeepAlive(send, interval_s=0.001)
    await asyncio.wait_for(is_tried.wait(), DEADLINE_S)
    await asyncio.sleep(0.01)
    keep_alive.stop()
    del keep_alive
    gc.collect()  # tasks whose exception nobody looked at complain when they die
    assert caplog.records == []
