"""Whatever a client sends: the right status, the envelope with its four keys, and a server that goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.builders.server import chat_body, serving
from tests.fakes import ScriptedEngine

JSON = {"content-type": "application/json"}
NESTED = b'{"model": "acme/tiny", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
USER = {"role": "user", "content": "hello"}


def assert_envelope(response: httpx.Response, *, status: int, code: str | None, param: str | None) -> str:
    """Check an error reply in full. Returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert (error["code"], error["param"]) == (code, param), error
    message = error["message"]
    assert isinstance(message, str)
    assert len(message) > 10
    assert "Traceback" not in message
    return message


async def assert_still_serves(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    response = await client.post("/v1/chat/completions", json=chat_body())
    assert response.json()["choices"][0]["message"]["content"] == "Hello world"


RAW_BODIES: dict[str, tuple[bytes, str | None]] = {
    "empty": (b"", None),
    "malformed": (b'{"model": "acme/tiny", ', None),
    "trailing garbage": (json.dumps(chat_body()).encode() + b"x", None),
    "invalid UTF-8": (b'{"model": "acme/tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}', None),
    "half a surrogate pair": (rb'{"model": "acme/tiny", "messages": [{"role": "user", "content": "\ud83d"}]}', None),
    "deep nesting": (NESTED, None),
    "a list": (b"[]", "invalid_value"),
    "a string": (b'"hello"', "invalid_value"),
    "null": (b"null", "invalid_value"),
}


@pytest.mark.parametrize("name", RAW_BODIES)
async def test_a_body_that_is_no_json_object(name: str) -> None:
    content, code = RAW_BODIES[name]
    async with serving(ScriptedEngine()) as client:
        response = await client.post("/v1/chat/completions", content=content, headers=JSON)
        assert_envelope(response, status=400, code=code, param=None)
        await assert_still_serves(client)


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "invalid_value", "model"),
    ({"model": 3}, "invalid_value", "model"),
    ({"max_tokens": 2**31}, "invalid_value", "max_tokens"),
    ({"max_tokens": 10**4000}, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 10**4000}, "invalid_value", "max_completion_tokens"),
    ({"top_k": 10**4000}, "invalid_value", "top_k"),
    ({"seed": 10**4000}, "invalid_value", "seed"),
    ({"temperature": 10**4000}, "invalid_value", "temperature"),
    ({"stop": "x" * 4097}, "invalid_value", "stop"),
    ({"messages": None}, "invalid_value", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hello"}, "invalid_value", "messages"),
    ({"messages": [1] * 1000}, "invalid_value", "messages[0]"),
    ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "invalid_value", "messages[1].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "missing_required_parameter", "messages[0].tool_call_id"),
    ({"messages": [{"role": 1, "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "invalid_value", "messages[0].content[0]"),
    ({"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
     "invalid_value", "messages[0].tool_calls"),
    ({"messages": [{**USER, "audio": {"id": "a"}}]}, "unsupported_parameter", "messages[0].audio"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "unsupported_parameter", "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "missing_required_parameter", "messages[0].content[0].text"),
    ({"temperature": -1}, "invalid_value", "temperature"),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"temperature": "0"}, "invalid_value", "temperature"),
    ({"temperature": True}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_p": 1.5}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": 1.5}, "invalid_value", "top_k"),
    ({"top_k": 2**31}, "invalid_value", "top_k"),
    ({"top_k": 10**30}, "invalid_value", "top_k"),
    ({"seed": 2**63}, "invalid_value", "seed"),
    ({"seed": "1"}, "invalid_value", "seed"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": -5}, "invalid_value", "max_tokens"),
    ({"max_tokens": 1.0}, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "invalid_value", "stop"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": ["a", ""]}, "invalid_value", "stop"),
    ({"stop": [1]}, "invalid_value", "stop[0]"),
    ({"stop": {"a": 1}}, "invalid_value", "stop"),
    ({"stream": "yes"}, "invalid_value", "stream"),
    ({"stream": 1}, "invalid_value", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": []}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "invalid_value", "stream_options.include_usage"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 129}, "invalid_value", "n"),
    ({"logprobs": 3}, "invalid_value", "logprobs"),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"min_p": 1.1}, "invalid_value", "min_p"),
    ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
    ({"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
    ({"bad_words": [" "]}, "invalid_value", "bad_words"),
    ({"min_tokens": 9, "max_tokens": 3}, "invalid_value", "min_tokens"),
    ({"priority": 3}, "invalid_value", "priority"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"request_id": "a b"}, "invalid_value", "request_id"),
    ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    ({"return_metrics": True, "n": 2}, "invalid_value", "return_metrics"),
    ({"echo": True}, "invalid_value", "echo"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "invalid_value", "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template": "x"}, "unsupported_parameter", "chat_template"),
    ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ({"functions": []}, "unsupported_parameter", "functions"),
    ({"guided_json": {}}, "unsupported_parameter", "guided_json"),
    ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "invalid_value", "structured_outputs"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"stream": True, "tools": []}, "invalid_value", "tools"),
    ({"tool_choice": "auto"}, "invalid_value", "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "invalid_value",
        "tools[0].function",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "param"), BAD_FIELDS, ids=lambda value: str(value)[:60])
async def test_a_bad_field_is_named(fields: dict[str, Any], code: str, param: str) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(**fields))
        message = assert_envelope(response, status=400, code=code, param=param)
        assert param.rpartition(".")[2].partition("[")[0] in message or code == "unsupported_parameter"
        assert engine.requests == []
        await assert_still_serves(client)


async def test_a_field_without_effect_is_named_in_a_header() -> None:
    async with serving(ScriptedEngine()) as client:
        for stream in (False, True):
            body = chat_body(temprature=0.5, messages=[{**USER, "mood": "good"}], stream=stream)
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            assert response.headers["x-ignored-fields"] == "temprature, messages[0].mood"
        response = await client.post("/v1/chat/completions", json=chat_body(user="bob"))
        assert "x-ignored-fields" not in response.headers


async def test_a_strict_server_refuses_it() -> None:
    async with serving(ScriptedEngine(), strict_params=True) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(messages=[{**USER, "mood": "good"}]))
        assert_envelope(response, status=400, code="unsupported_parameter", param="messages[0].mood")


@pytest.mark.parametrize("field", ["model", "messages"])
async def test_a_missing_field_is_named(field: str) -> None:
    body = chat_body()
    del body[field]
    async with serving(ScriptedEngine()) as client:
        response = await client.post("/v1/chat/completions", json=body)
        assert_envelope(response, status=400, code="missing_required_parameter", param=field)


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
async def test_a_temperature_that_is_no_number(text: bytes) -> None:
    body = json.dumps(chat_body(temperature=-77)).encode().replace(b"-77", text)
    async with serving(ScriptedEngine()) as client:
        response = await client.post("/v1/chat/completions", content=body, headers=JSON)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_an_unknown_model() -> None:
    async with serving(ScriptedEngine(), served_model_name=("small", "chat")) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(model="gpt-9"))
        message = assert_envelope(response, status=404, code="model_not_found", param="model")
        assert "gpt-9" in message
        assert "small, chat" in message


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_another_content_type(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with serving(ScriptedEngine()) as client:
        content = json.dumps(chat_body()).encode()
        response = await client.post("/v1/chat/completions", content=content, headers=headers)
        assert_envelope(response, status=415, code="unsupported_media_type", param=None)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON"])
async def test_json_by_other_spellings(content_type: str) -> None:
    async with serving(ScriptedEngine()) as client:
        content = json.dumps(chat_body()).encode()
        response = await client.post("/v1/chat/completions", content=content, headers={"content-type": content_type})
        assert response.status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/nothing", "/v1/chat/completions/", "/v1/chat"])
async def test_no_such_path(path: str) -> None:
    async with serving(ScriptedEngine()) as client:
        assert_envelope(await client.get(path), status=404, code="not_found", param=None)


@pytest.mark.parametrize(
    ("method", "path", "allow"), [("GET", "/v1/chat/completions", "POST"), ("PUT", "/v1/models", "GET")]
)
async def test_no_such_method(method: str, path: str, allow: str) -> None:
    async with serving(ScriptedEngine()) as client:
        response = await client.request(method, path)
        assert_envelope(response, status=405, code="method_not_allowed", param=None)
        assert response.headers["allow"] == allow


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 4}])
async def test_a_prompt_longer_than_the_context(fields: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(max_model_len=64)) as client:
        body = chat_body(messages=[{"role": "user", "content": "x" * 100}], **fields)
        response = await client.post("/v1/chat/completions", json=body)
        message = assert_envelope(response, status=400, code="context_length_exceeded", param="messages")
        assert "maximum context length is 64 tokens" in message
        await assert_still_serves_in(client)


async def assert_still_serves_in(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200


async def test_the_sum_of_prompt_and_answer_must_fit_exactly() -> None:
    engine = ScriptedEngine(max_model_len=200)
    async with serving(engine) as client:
        await client.post("/v1/chat/completions", json=chat_body())
        room = 200 - len(engine.requests[0].prompt_token_ids)
        fits = await client.post("/v1/chat/completions", json=chat_body(max_tokens=room))
        assert fits.status_code == 200
        for name in ("max_tokens", "max_completion_tokens"):
            response = await client.post("/v1/chat/completions", json=chat_body(**{name: room + 1}))
            message = assert_envelope(response, status=400, code="context_length_exceeded", param="messages")
            assert f"needs 201: {200 - room} in the messages and {room + 1} in the completion" in message


async def test_nulls_are_absent_fields() -> None:
    engine = ScriptedEngine()
    names = ["temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens", "stop", "stream"]
    names += ["stream_options", "n", "logprobs", "tools", "never_heard_of"]
    async with serving(engine) as client:
        message = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None}
        body = chat_body(messages=[message, USER], **dict.fromkeys(names))
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, 0, None)
    assert (params.max_tokens, params.stop) == (None, ())


@pytest.mark.parametrize("top_k", [0, -1])
async def test_both_ways_to_say_all_tokens(top_k: int) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(top_k=top_k))
        assert response.status_code == 200, response.text
    assert engine.requests[0].params.top_k == 0


async def test_a_number_of_thousands_of_digits_is_the_clients_fault() -> None:
    body = json.dumps(chat_body(seed=1)).replace('"seed": 1', '"seed": ' + "9" * 5000)
    async with serving(ScriptedEngine()) as client:
        response = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


MANY: dict[str, dict[str, Any]] = {
    "unknown keys": {str(number): 1 for number in range(60_000)},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 30_000}]},
    "empty objects": {"x": [{}] * 60_000},
    "nested lists": {"x": [[[0]] * 100] * 400},
}


@pytest.mark.parametrize("name", MANY)
async def test_a_body_of_very_many_values_is_refused_before_it_is_checked(name: str) -> None:
    async with serving(ScriptedEngine()) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(**MANY[name]))
        message = assert_envelope(response, status=400, code="invalid_value", param=None)
        assert "more than 50000 values" in message
        await assert_still_serves(client)


async def test_a_large_body_of_few_values_is_read() -> None:
    text = "many words " * 40_000
    async with serving(ScriptedEngine(max_model_len=10**6)) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(messages=[{**USER, "content": text}]))
    assert response.status_code == 200
