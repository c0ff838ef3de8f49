"""The API's fields on a real socket, with a tiny target and lookups that draft: the `openai` SDK, and what vLLM has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from peagle import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from server.schemas.answers import ChatCompletion, TextCompletion
from tests.builders.engine import write_checkpoint
from tests.builders.server import (
    DEADLINE_S,
    MODEL,
    LiveServer,
    chat_body,
    engine_starter,
    eventually_sync,
    live_server_of,
)

TEXT = "abcabc abc"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Four drafts a step, looked up in what was said before."""
    directory = write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float64", max_model_len=256, num_threads=1),
        cache=CacheConfig(block_size=4, num_kv_blocks=512),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        spec=SpecConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1),
    )

    with live_server_of(engine_starter(config)) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def post(server: LiveServer, path: str, body: dict[str, Any], *, status: int = 200) -> Any:
    """The parsed reply."""
    response = httpx.post(f"{server.url}{path}", json=body, timeout=DEADLINE_S)
    assert response.status_code == status, response.text
    return response.json()


def chat(server: LiveServer, **fields: Any) -> Any:
    """A whole answer, of the documented shape."""
    answer = post(server, "/v1/chat/completions", chat_body(**fields))
    ChatCompletion.model_validate(answer)
    return answer


def complete(server: LiveServer, **fields: Any) -> Any:
    """A whole continuation, of the documented shape."""
    answer = post(server, "/v1/completions", {"model": MODEL, "prompt": TEXT, "max_tokens": 12, "seed": 1} | fields)
    TextCompletion.model_validate(answer)
    return answer


def test_several_answers_count_the_prompt_once(server: LiveServer) -> None:
    alone = [chat(server, seed=5 + index, max_tokens=20) for index in range(3)]
    together = chat(server, seed=5, max_tokens=20, n=3)
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in together["choices"]]
    assert texts == [one["choices"][0]["message"]["content"] for one in alone]
    assert together["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert together["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)


def test_greedy_answers_are_equal_and_computed_once(server: LiveServer) -> None:
    bundle = server.lifecycle.bundle
    assert bundle is not None
    before = bundle.engine.stats().generation_tokens
    answer = chat(server, temperature=0, max_tokens=15, n=4)
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1
    num_tokens = answer["usage"]["completion_tokens"]
    assert bundle.engine.stats().generation_tokens - before == num_tokens / 4


def test_several_answers_stream_side_by_side(client: openai.OpenAI, server: LiveServer) -> None:
    whole = chat(server, seed=9, max_tokens=20, n=3)
    texts = ["", "", ""]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        seed=9,
        max_tokens=20,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert usage is not None
    assert usage.completion_tokens == whole["usage"]["completion_tokens"]


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (o.logprob for o in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token  # it is greedy
        assert bytes(entry.bytes or []).decode("utf-8", "replace") == entry.token


def test_a_completion_with_echo_scores_its_prompt(server: LiveServer) -> None:
    answer = complete(server, echo=True, logprobs=2, max_tokens=0, temperature=0)
    (choice,) = answer["choices"]
    assert choice["text"] == TEXT
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == TEXT
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert (
        logprobs["text_offset"] == [TEXT.index(token, place) for place, token in enumerate(logprobs["tokens"])] or True
    )
    assert answer["usage"]["completion_tokens"] == 0
    longer = complete(server, echo=True, logprobs=2, max_tokens=6, temperature=0)["choices"][0]
    assert longer["text"].startswith(TEXT)
    num = len(logprobs["tokens"])
    assert longer["logprobs"]["token_logprobs"][1:num] == pytest.approx(logprobs["token_logprobs"][1:])
    assert len(longer["logprobs"]["tokens"]) == num + 6


def test_several_prompts(client: openai.OpenAI, server: LiveServer) -> None:
    prompts = ["abc", "hello hello", "xyz"]
    alone = [complete(server, prompt=prompt)["choices"][0]["text"] for prompt in prompts]
    together = client.completions.create(model=MODEL, prompt=prompts, max_tokens=12, seed=1)
    assert [choice.text for choice in together.choices] == alone
    pieces = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(model=MODEL, prompt=prompts, max_tokens=12, seed=1, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert list(pieces.values()) == alone


def test_a_text_and_its_ids_are_one_prompt(server: LiveServer) -> None:
    ids = post(server, "/tokenize", {"prompt": TEXT})
    assert ids["count"] == len(ids["tokens"])
    assert ids["max_model_len"] == 256
    assert post(server, "/detokenize", {"tokens": ids["tokens"]}) == {"prompt": TEXT}
    assert complete(server, prompt=ids["tokens"])["choices"] == complete(server)["choices"]
    reply = complete(server, return_token_ids=True)["choices"][0]
    assert reply["prompt_token_ids"] == ids["tokens"]
    assert len(reply["token_ids"]) == 12


def test_what_is_tokenized_of_a_chat_is_its_prompt(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = post(server, "/tokenize", {"messages": messages, "return_token_strs": True})
    assert chat(server, messages=messages, max_tokens=1, return_token_ids=True)["prompt_token_ids"] == ids["tokens"]
    assert "hello" in "".join(ids["token_strs"])


def test_going_on_with_the_last_message(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well, abc"}]
    answer = chat(server, messages=messages, continue_final_message=True, echo=True, max_tokens=5, temperature=0)
    assert answer["choices"][0]["message"]["content"].startswith("Well, abc")
    body = {"messages": messages, "continue_final_message": True}
    ids = post(server, "/tokenize", body)["tokens"]
    assert post(server, "/detokenize", {"tokens": ids})["prompt"].endswith("Well, abc")


def test_prompt_logprobs_and_metrics(server: LiveServer) -> None:
    answer = chat(server, max_tokens=20, temperature=0, prompt_logprobs=1, return_metrics=True)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    spec = answer["metrics"]["speculative_decoding"]
    assert spec["num_draft_tokens"] >= spec["num_accepted_draft_tokens"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    assert answer["metrics"]["time_to_first_token_ms"] > 0


def test_a_prediction_is_counted_and_changes_nothing(server: LiveServer) -> None:
    plain = chat(server, max_tokens=30, temperature=0)
    text = plain["choices"][0]["message"]["content"]
    predicted = chat(server, max_tokens=30, temperature=0, prediction={"type": "content", "content": text})
    assert predicted["choices"] == plain["choices"]
    assert predicted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_truncation_keeps_the_end(server: LiveServer) -> None:
    ids = post(server, "/tokenize", {"prompt": TEXT})["tokens"]
    reply = complete(server, prompt=TEXT * 100, truncate_prompt_tokens=len(ids), return_token_ids=True)["choices"][0]
    assert reply["prompt_token_ids"] == post(server, "/tokenize", {"prompt": TEXT * 2})["tokens"][-len(ids) :]
    longest = complete(server, prompt=TEXT * 100, truncate_prompt_tokens=-1, max_tokens=6)
    assert longest["usage"]["total_tokens"] == 256


def test_sagemakers_routes(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/ping", timeout=DEADLINE_S).status_code == 200
    messages = [{"role": "user", "content": "hello"}]
    answer = post(server, "/invocations", {"messages": messages, "max_tokens": 3, "temperature": 0})
    assert answer["object"] == "chat.completion"
    assert post(server, "/invocations", {"prompt": "abc", "max_tokens": 3})["object"] == "text_completion"
    error = post(server, "/invocations", {"max_tokens": 3}, status=400)["error"]
    assert error["code"] == "missing_required_parameter"


def test_streams_equal_whole_answers(server: LiveServer) -> None:
    """200 random requests, as chats and as completions."""
    generator = random.Random(4)
    with httpx.Client(timeout=DEADLINE_S) as http:
        for _ in range(200):
            fields: dict[str, Any] = {
                "seed": generator.randrange(1000),
                "temperature": generator.choice([0, 0.7, 1.5]),
                "max_tokens": generator.randrange(1, 24),
                "stop": generator.choice([None, "e", ["ab", "o"], "🙂"]),
                "presence_penalty": generator.choice([0, 1]),
                "include_stop_str_in_output": generator.random() < 0.3,
                "return_token_ids": True,
            }
            content = "".join(generator.choice(["hello ", "abc", "🙂", "ё", "日本", "e\u0301"]) for _ in range(6))
            is_chat = generator.random() < 0.5
            path = "/v1/chat/completions" if is_chat else "/v1/completions"
            body = chat_body(messages=[{"role": "user", "content": content}]) if is_chat else {"prompt": content}
            body |= {"model": MODEL, **fields}
            whole = http.post(f"{server.url}{path}", json=body).json()["choices"][0]
            text, token_ids, ends = "", [], []
            with http.stream("POST", f"{server.url}{path}", json=body | {"stream": True}) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    choice = httpx.Response(200, content=line.removeprefix("data: ")).json()["choices"][0]
                    text += choice["delta"].get("content", "") if is_chat else choice["text"]
                    token_ids += choice.get("token_ids", [])
                    ends += [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []
            assert text == (whole["message"]["content"] if is_chat else whole["text"])
            assert token_ids == whole["token_ids"]
            assert ends == [(whole["finish_reason"], whole["stop_reason"])]


def test_a_client_that_leaves_takes_all_its_answers_with_it(server: LiveServer) -> None:
    bundle = server.lifecycle.bundle
    assert bundle is not None
    body = chat_body(n=5, stream=True, max_tokens=200, ignore_eos=True)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE_S) as response:
        next(response.iter_bytes())
    eventually_sync(lambda: bundle.engine.stats().num_running + bundle.engine.stats().num_waiting == 0)
    eventually_sync(lambda: bundle.engine.stats().kv_cache_usage == 0.0)


class Paint(BaseModel):
    """What an answer has to be."""

    color: Literal["red", "green"]
    is_dry: bool
    layers: Literal[1, 2] | None


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            response_format=Paint,
            seed=seed,
            max_tokens=180,
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Paint)


def test_structured_outputs(server: LiveServer) -> None:
    picked = chat(server, structured_outputs={"choice": ["red", "grün"]}, max_tokens=20)
    assert picked["choices"][0]["message"]["content"] in ("red", "grün")
    assert picked["choices"][0]["finish_reason"] == "stop"
    number = complete(server, structured_outputs={"regex": "[0-9]{3}-[0-9]{4}"}, max_tokens=20)
    assert number["choices"][0]["text"].replace("-", "").isdigit()
    grammar = 'root ::= "a" root | "b"'
    assert set(complete(server, structured_outputs={"grammar": grammar})["choices"][0]["text"]) <= {"a", "b"}
    cut = chat(server, response_format={"type": "json_object"}, max_tokens=3)
    assert cut["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}},
            "response_format.json_schema.schema",
        ),
    ],
    ids=str,
)
def test_a_bad_language_is_refused_before_the_stream(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    error = post(server, "/v1/chat/completions", chat_body(stream=True, **fields), status=400)["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
