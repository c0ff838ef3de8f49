"""POST /v1/chat/completions: the answer's shape, and what reaches the engine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest

from peagle.errors import ContextLengthError, EngineDeadError, EngineOverloadedError
from peagle.sequence import FinishReason
from peagle.text import Tokenizer
from server.answer_parts import FINGERPRINT
from server.prompts import LONGEST_INLINE_TEXT
from tests.builders.server import MODEL, chat_body, serving, tiny_tokenizer
from tests.fakes import Say, ScriptedEngine
from tests.unit.server.test_bad_input import assert_envelope

PATH = "/v1/chat/completions"


async def test_a_whole_answer_has_openais_shape() -> None:
    engine = ScriptedEngine(cached_tokens=16)
    async with serving(engine) as client:
        response = await client.post(PATH, json=chat_body())
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    num_prompt_tokens = len(engine.requests[0].prompt_token_ids)
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 5,
            "total_tokens": num_prompt_tokens + 5,
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
        "system_fingerprint": FINGERPRINT,
    }


async def test_the_finish_reason_of_a_cut_answer_is_length() -> None:
    async with serving(ScriptedEngine(finish_reason=FinishReason.LENGTH)) as client:
        answer = (await client.post(PATH, json=chat_body())).json()
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_every_sampling_field_reaches_the_engine() -> None:
    engine = ScriptedEngine()
    body = chat_body(temperature=0, top_p=0.5, top_k=7, seed=-3, max_tokens=9, stop=["a", "b"])
    async with serving(engine) as client:
        await client.post(PATH, json=body)
        await client.post(PATH, json=chat_body(max_tokens=9, max_completion_tokens=4, stop="END"))
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.seed) == (0.0, 0.5, 7, -3)
    assert (first.max_tokens, first.stop) == (9, ("a", "b"))
    assert (second.max_tokens, second.stop) == (4, ("END",))


CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, str]]]] = [
    (
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
        [{"role": "user", "content": "one\ntwo"}],
    ),
    (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "ü🙂"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "ü🙂"}],
    ),
]


@pytest.mark.parametrize(("sent", "rendered"), CONVERSATIONS)
async def test_the_prompt_is_the_rendered_template(sent: list[dict[str, Any]], rendered: list[dict[str, str]]) -> None:
    engine, tokenizer = ScriptedEngine(), tiny_tokenizer()
    async with serving(engine) as client:
        response = await client.post(PATH, json=chat_body(messages=sent))
    assert response.status_code == 200
    expected = tokenizer.encode(tokenizer.chat_template.render(rendered), add_special_tokens=False)
    assert engine.requests[0].prompt_token_ids == expected


async def test_a_long_prompt_is_tokenised_as_a_short_one_is() -> None:
    engine, tokenizer = ScriptedEngine(max_model_len=100_000), tiny_tokenizer()
    text = "hello there " * LONGEST_INLINE_TEXT
    async with serving(engine) as client:
        await client.post(PATH, json=chat_body(messages=[{"role": "user", "content": text}]))
    rendered = tokenizer.chat_template.render([{"role": "user", "content": text}])
    assert engine.requests[0].prompt_token_ids == tokenizer.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "needs"),
    [
        ([{"role": "user", "content": "x" * 3_000_000}], "3000000 bytes"),
        ([{"role": "user", "content": ""}] * 15_000, "15000 messages"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * 15_000}], "14999 bytes"),
    ],
)
async def test_what_cannot_fit_is_refused_untokenised(
    messages: list[dict[str, Any]], needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    async with serving(ScriptedEngine()) as client:
        response = await client.post(PATH, json=chat_body(messages=messages))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "512 tokens" in error["message"]
    assert needs in error["message"]


async def test_long_prompts_are_tokenised_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, most = 0, 0
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.01)
        at_work -= 1
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    body = chat_body(messages=[{"role": "user", "content": "hello " * LONGEST_INLINE_TEXT}])
    async with serving(ScriptedEngine(max_model_len=100_000)) as client:
        replies = await asyncio.gather(*(client.post(PATH, json=body) for _ in range(6)))
    assert {reply.status_code for reply in replies} == {200}
    assert most == 1


async def test_request_ids_are_the_servers_own() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        answers = [await client.post(PATH, json=chat_body(), headers={"x-request-id": "same"}) for _ in range(2)]
    ids = [request.request_id for request in engine.requests]
    assert ids == [answer.json()["id"] for answer in answers]
    assert ids[0] != ids[1]


async def test_answers_carry_the_first_name() -> None:
    async with serving(ScriptedEngine(), served_model_name=("small", "chat")) as client:
        whole = await client.post(PATH, json=chat_body(model="chat"))
        streamed = await client.post(PATH, json=chat_body(model="chat", stream=True))
    assert whole.json()["model"] == "small"
    assert orjson.loads(streamed.text.split("\n")[0].removeprefix("data: "))["model"] == "small"


REFUSALS: list[tuple[Exception, int, str | None, str | None]] = [
    (EngineOverloadedError("full"), 503, "server_overloaded", None),
    (EngineDeadError("gone, see /root/peagle/engine.py"), 500, "engine_dead", None),
    (ContextLengthError("too long by far", param="messages"), 400, "context_length_exceeded", "messages"),
    (RuntimeError("a secret in /root/peagle"), 500, "internal_error", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refusal", "status", "code", "param"), REFUSALS)
async def test_refusals_are_real_statuses_streaming_or_not(
    refusal: Exception, status: int, code: str | None, param: str | None, stream: bool
) -> None:
    async with serving(ScriptedEngine(refusal=refusal)) as client:
        response = await client.post(PATH, json=chat_body(stream=stream))
    message = assert_envelope(response, status=status, code=code, param=param)
    assert "/root" not in message
    assert ("retry-after" in response.headers) == (status == 503)
    assert ("retry-after-ms" in response.headers) == (status == 503)


FAILURES: list[tuple[ScriptedEngine, str]] = [
    (ScriptedEngine(finish_reason=FinishReason.ERROR, error="step 3 in /root/x.py"), "generation_failed"),
    (ScriptedEngine(finish_reason=FinishReason.ABORT), "request_aborted"),
    (ScriptedEngine(failure=EngineDeadError("gone")), "engine_dead"),
    (ScriptedEngine(failure=ZeroDivisionError("in /root/x.py")), "internal_error"),
]


@pytest.mark.parametrize(("engine", "code"), FAILURES)
async def test_a_failure_before_the_end_is_an_error(engine: ScriptedEngine, code: str) -> None:
    async with serving(engine) as client:
        response = await client.post(PATH, json=chat_body())
        message = assert_envelope(response, status=500, code=code, param=None)
        assert "/root" not in message
        assert (await client.get("/health")).status_code == 200
    assert engine.num_open == 0


@pytest.mark.parametrize(("engine", "code"), FAILURES)
async def test_a_failure_in_mid_stream_is_an_event(engine: ScriptedEngine, code: str) -> None:
    async with serving(engine) as client:
        response = await client.post(PATH, json=chat_body(stream=True))
    assert response.status_code == 200
    *events, error_event, done = response.text.removesuffix("\n\n").split("\n\n")
    assert len(events) == 4  # role and three texts
    error = orjson.loads(error_event.removeprefix("data: "))["error"]
    assert (error["code"], error["type"], error["param"]) == (code, "server_error", None)
    assert "/root" not in error["message"]
    assert done == "data: [DONE]"
    assert engine.num_open == 0


async def test_text_that_never_comes_is_an_empty_answer() -> None:
    async with serving(ScriptedEngine(script=[Say("")])) as client:
        whole = await client.post(PATH, json=chat_body())
        streamed = await client.post(PATH, json=chat_body(stream=True))
    assert whole.json()["choices"][0]["message"]["content"] == ""
    events = [orjson.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
    assert [event["choices"][0]["delta"].get("role") for event in events] == ["assistant", None]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
