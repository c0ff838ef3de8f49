"""`/v1/responses` on a real socket with the `openai` SDK: a tiny target with random text, lookups that draft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from peagle import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from peagle.text import AnswerFormat
from server.schemas.answers import ResponseObject
from tests.builders.engine import write_checkpoint
from tests.builders.server import DEADLINE_S, MODEL, LiveServer, engine_starter, eventually_sync, live_server_of

TOOLS: Any = [{"type": "function", "name": "now", "strict": True, "parameters": None}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


def live(directory: Any, **server_options: Any) -> Any:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float64", max_model_len=2048, num_threads=1),
        cache=CacheConfig(block_size=4, num_kv_blocks=1024),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        spec=SpecConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1),
    )

    answers = AnswerFormat.choose(tool_call_parser="hermes", reasoning_parser="none", chat_template=None)
    return live_server_of(engine_starter(config, answers), **server_options)


@pytest.fixture(scope="module")
def server(directory: Any) -> Iterator[LiveServer]:
    with live(directory) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def post(server: LiveServer, *, status: int = 200, **fields: Any) -> Any:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 12, **fields}
    response = httpx.post(f"{server.url}/v1/responses", json=body, timeout=DEADLINE_S)
    assert response.status_code == status, response.text
    if status == 200 and not fields.get("stream"):
        ResponseObject.model_validate(response.json())
    return response.json()


def test_a_response_is_a_message_and_its_usage(client: Any) -> None:
    response = client.responses.create(
        model=MODEL, input="hello", instructions="Be brief.", max_output_tokens=9, temperature=0, metadata={"a": "b"}
    )
    assert response.id.startswith("resp_")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    (message,) = response.output
    assert (message.type, message.status) == ("message", "incomplete")
    assert response.usage is not None
    assert response.usage.output_tokens == 9
    assert response.usage.total_tokens == response.usage.input_tokens + 9
    assert (response.metadata, response.instructions) == ({"a": "b"}, "Be brief.")


def test_it_says_what_a_chat_says(client: Any) -> None:
    fields: dict[str, Any] = {"temperature": 0, "model": MODEL}
    response = client.responses.create(input="hello", max_output_tokens=20, **fields)
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "hello"}], max_tokens=20, **fields)
    assert response.output_text == chat.choices[0].message.content


def test_a_stream_ends_with_what_is_said_at_once(client: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert text == whole.output_text == last.response.output_text
    assert last.response.usage == whole.usage


class Flag(BaseModel):
    """What an answer may be held to."""

    on: bool


def test_the_sdk_follows_a_stream(client: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "hello", "extra_body": {"seed": 2}, "text_format": Flag}
    with client.responses.stream(**fields) as stream:
        found = stream.get_final_response()
    assert found.status == "completed"
    assert isinstance(found.output_parsed, Flag)


def test_a_conversation_goes_on(client: Any, server: LiveServer) -> None:
    first = client.responses.create(model=MODEL, input="hello", max_output_tokens=6, temperature=0)
    second = client.responses.create(
        model=MODEL, input="and now", max_output_tokens=6, temperature=0, previous_response_id=first.id
    )
    by_hand = client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "and now"},
        ],
        max_output_tokens=6,
        temperature=0,
    )
    assert second.output_text == by_hand.output_text
    assert second.usage is not None
    assert by_hand.usage is not None
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    assert client.responses.retrieve(second.id) == second
    items = client.responses.input_items.list(second.id)
    assert [item.content[0].text for item in items.data] == ["and now"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    error = post(server, previous_response_id=second.id, status=400)["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_what_is_not_stored_is_not_there(client: Any) -> None:
    response = client.responses.create(model=MODEL, input="hello", max_output_tokens=3, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_functions_are_called_and_answered(client: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "max_output_tokens": 300, "extra_body": {"seed": 3}}
    response = client.responses.create(input="hello", tool_choice={"type": "function", "name": "now"}, **fields)
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("now", {}, "completed")
    events = list(client.responses.create(input="hello", tool_choice="required", stream=True, **fields))
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done
    assert done[0].arguments in "".join(arguments)
    after = client.responses.create(
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}],
        previous_response_id=response.id,
        tool_choice="none",
        **fields | {"max_output_tokens": 5},
    )
    assert after.output[0].type == "message"


def test_text_is_held_to_a_schema(client: Any) -> None:
    response = client.responses.parse(model=MODEL, input="hello", text_format=Flag, max_output_tokens=200)
    assert isinstance(response.output_parsed, Flag)


def test_log_probabilities_are_those_of_the_text(client: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 6, "temperature": 0}
    response = client.responses.create(include=["message.output_text.logprobs"], top_logprobs=2, **fields)
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == 6
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    events = client.responses.create(include=["message.output_text.logprobs"], top_logprobs=2, stream=True, **fields)
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.logprob for one in streamed] == [one.logprob for one in logprobs]


def test_a_response_in_the_background(client: Any, server: LiveServer) -> None:
    response = client.responses.create(model=MODEL, input="hello", max_output_tokens=8, background=True)
    assert response.status == "in_progress"
    eventually_sync(lambda: client.responses.retrieve(response.id).status == "incomplete")
    assert client.responses.retrieve(response.id).output_text
    long = client.responses.create(
        model=MODEL, input="hello", max_output_tokens=1900, background=True, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "incomplete", "what has ended stays as it is"
    eventually_sync(lambda: server.lifecycle.num_active == 0)
    error = post(server, previous_response_id=long.id, status=400)["error"]
    assert error["param"] == "previous_response_id"


def test_cancelling_what_is_not_in_the_background_is_an_error(client: Any) -> None:
    response = client.responses.create(model=MODEL, input="hello", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(response.id)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", None),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "missing_required_parameter"),
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"max_output_tokens": 100_000}, "input", "context_length_exceeded"),
        ({"input": "x " * 3000}, "input", "context_length_exceeded"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", None),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            "text.format",
            "invalid_value",
        ),
        ({"background": True, "stream": True}, "background", "invalid_value"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "unsupported_parameter"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "unsupported_parameter"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "previous_response_not_found"),
    ],
)
def test_what_is_wrong_is_said_in_this_paths_words(
    server: LiveServer, fields: dict[str, Any], param: str, code: str | None
) -> None:
    for stream in (False, True):
        error = post(server, status=400, **({"stream": stream} | fields))["error"]
        assert error["param"] == param
        assert code is None or error["code"] == code


def test_the_oldest_make_room(directory: Any) -> None:
    with live(directory, max_stored_response_bytes=6000) as server:
        ids = [post(server, max_output_tokens=3)["id"] for _ in range(8)]
        found = [httpx.get(f"{server.url}/v1/responses/{one}").status_code for one in ids]
        assert found[0] == 404
        assert found[-1] == 200
        assert found == sorted(found, reverse=True)


def test_a_response_belongs_to_its_client(directory: Any) -> None:
    with live(directory, api_key=("one", "two")) as server:
        headers = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        body = {"model": MODEL, "input": "hello", "max_output_tokens": 3}
        made = httpx.post(f"{server.url}/v1/responses", json=body, headers=headers[0], timeout=DEADLINE_S).json()
        url = f"{server.url}/v1/responses/{made['id']}"
        assert [httpx.get(url, headers=one).status_code for one in headers] == [200, 404]
        assert httpx.delete(url, headers=headers[1]).status_code == 404


def test_a_method_that_is_not_taken_is_told_which_are(server: LiveServer) -> None:
    reply = httpx.put(f"{server.url}/v1/responses/resp_1")
    assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET")
