"""Tool calls and reasoning over HTTP: what a client gets of an answer that holds them, whole and in chunks."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.sequence import FinishReason
from peagle.text import AnswerFormat
from server.schemas.answers import ChatCompletion
from tests.builders.server import chat_body, serving, tiny_tokenizer
from tests.fakes import Say, ScriptedEngine

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def answers(tools: str = "hermes", reasoning: str = "none") -> AnswerFormat:
    return AnswerFormat.choose(tool_call_parser=tools, reasoning_parser=reasoning, chat_template=None)


def says(*texts: str, ends: FinishReason = FinishReason.STOP) -> ScriptedEngine:
    return ScriptedEngine(script=[Say(text) for text in texts], finish_reason=ends)


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The first choice of a whole answer."""
    response = await client.post("/v1/chat/completions", json=chat_body(**fields))
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json())
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def stream(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The same, put together from chunks as the SDK does it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    response = await client.post("/v1/chat/completions", json=chat_body(stream=True, **fields))
    assert response.status_code == 200, response.text
    for line in response.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function"
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


def seen(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole choice in the shape of `stream`."""
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
    }


async def test_calls_are_told_apart_from_text() -> None:
    async with serving(says("Let me ", f"look.\n{CALL[:30]}", CALL[30:])) as client:
        choice = await ask(client, tools=TOOLS)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me look."
        (call,) = choice["message"]["tool_calls"]
        assert call["id"].startswith("call_")
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


async def test_an_answer_of_calls_alone_has_no_content() -> None:
    async with serving(says(f"{CALL}\n{NOW}")) as client:
        message = (await ask(client, tools=TOOLS))["message"]
        assert message["content"] is None
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]
        ids = {call["id"] for call in message["tool_calls"]}
        assert len(ids) == 2


async def test_without_tools_nothing_is_looked_for() -> None:
    async with serving(says(CALL)) as client:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = await ask(client, **fields)
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


@pytest.mark.parametrize(
    ("text", "ends", "finish_reason"),
    [
        (CALL, FinishReason.STOP, "tool_calls"),
        (CALL, FinishReason.LENGTH, "length"),
        (CALL[:60], FinishReason.LENGTH, "length"),
        ("Hello", FinishReason.STOP, "stop"),
        ("<tool_call>no</tool_call>", FinishReason.STOP, "stop"),
    ],
)
async def test_how_an_answer_ended(text: str, ends: FinishReason, finish_reason: str) -> None:
    async with serving(says(text, ends=ends)) as client:
        assert (await ask(client, tools=TOOLS))["finish_reason"] == finish_reason
        assert (await stream(client, tools=TOOLS))["finish_reason"] == finish_reason


async def test_one_call_where_several_are_not_wanted() -> None:
    async with serving(says(CALL, NOW)) as client:
        fields: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
        assert seen(await ask(client, **fields))["calls"] == [["weather", '{"city": "Oslo"}']]
        assert (await stream(client, **fields))["calls"] == [["weather", '{"city": "Oslo"}']]


async def test_reasoning_has_a_field_and_a_count_of_its_own() -> None:
    engine = says("<think>I wonder", ".</think>\n\nYes.")
    async with serving(engine, answers=answers(reasoning="think")) as client:
        response = await client.post("/v1/chat/completions", json=chat_body())
        message = response.json()["choices"][0]["message"]
        assert message["content"] == "Yes."
        assert message["reasoning_content"] == message["reasoning"] == "I wonder."
        details = response.json()["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] > 0
        assert (await stream(client))["reasoning_content"] == "I wonder."


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from([CALL, NOW, "Hi. ", "é😀", "<tool_call>", "\n", "<think>Hm.</think>", "{", "</"]), max_size=6
    ),
    st.lists(st.integers(0, 200), max_size=10),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_streams_say_what_whole_answers_say(parts: list[str], cuts: list[int], ends: FinishReason) -> None:
    text = "".join(parts)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]

    async def compare() -> None:
        async with serving(says(*pieces, ends=ends), answers=answers(reasoning="think")) as client:
            assert await stream(client, tools=TOOLS) == seen(await ask(client, tools=TOOLS))

    asyncio.run(compare())


async def test_a_server_without_a_parser_says_so() -> None:
    async with serving(says("x"), answers=answers(tools="none")) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(tools=TOOLS))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tools"
        assert "--tool-call-parser" in error["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"tool_choice": "required"}, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_calls"),
        ({"response_format": {"type": "json_object"}}, "tool_calls"),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, "json_object"),
    ],
)
async def test_what_an_answer_is_held_to(fields: dict[str, Any], expected: str | None) -> None:
    engine = says("x")
    async with serving(engine) as client:
        await ask(client, tools=TOOLS, **fields)
    grammar = engine.requests[0].params.grammar
    assert (None if grammar is None else grammar.kind) == expected


async def test_a_strict_function_is_held_to_its_parameters() -> None:
    engine = says("x")
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    async with serving(engine) as client:
        await ask(client, tools=strict)
        assert engine.requests[0].params.grammar is not None
    async with serving(engine, answers=answers(tools="harmony")) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(tools=strict))
        assert response.status_code == 400
        assert "required" in response.json()["error"]["message"]


async def test_tools_go_with_json_and_no_other_format() -> None:
    async with serving(says("x")) as client:
        body = chat_body(tools=TOOLS, structured_outputs={"regex": "a+"})
        response = await client.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_the_model_is_told_of_tools_and_of_what_came_of_them() -> None:
    engine = says("x")
    engine.max_model_len = 2048
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    async with serving(engine) as client:
        await ask(client, messages=messages, tools=TOOLS)
        await ask(client, messages=messages, tools=TOOLS, tool_choice="none")
    told, not_told = (
        tiny_tokenizer().decode(request.prompt_token_ids, skip_special_tokens=True) for request in engine.requests
    )
    for text in (told, not_told):
        assert CALL in text
        assert "<tool_response>\nRain.\n</tool_response>" in text
    assert '{"name": "weather", "parameters"' in told
    assert told.index("Be brief.") < told.index("<tools>")
    assert "<tools>" not in not_told


async def test_a_template_of_the_request_is_used_where_it_is_trusted() -> None:
    engine = says("x")
    async with serving(engine) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(chat_template="ab"))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
    async with serving(engine, trust_request_chat_template=True) as client:
        template = "{% for m in messages %}ab{{ m.content }}{% endfor %}"
        await ask(client, chat_template=template)
        for bad in ("{% if %}", "{{ messages.__class__.__mro__[1].__subclasses__() }}"):
            response = await client.post("/v1/chat/completions", json=chat_body(chat_template=bad))
            assert response.status_code == 400, response.text
    assert tiny_tokenizer().decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=True) == "abhello"
