"""Tool calls on a real socket with the `openai` SDK: a tiny target that knows no tools, held to them by a grammar.

Its logits are random, so every call that is valid is so because of the grammar, and drafts are wrong all the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from peagle import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from peagle.text import AnswerFormat
from peagle.text.tool_parsers import TOOL_FORMATS
from tests.builders.engine import write_checkpoint
from tests.builders.server import MODEL, LiveServer, engine_starter, live_server_of

PARAMETERS = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "make", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
HELLO: Any = [{"role": "user", "content": "hello"}]
FORMATS = [name for name in TOOL_FORMATS if name != "harmony"]  # the tiny vocabulary spells its marks, at length


@pytest.fixture(scope="module", params=FORMATS)
def servers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[list[LiveServer]]:
    """Plain, and with drafts that are looked up."""
    directory = write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)

    answers = AnswerFormat.choose(tool_call_parser=request.param, reasoning_parser="none", chat_template=None)

    def start_with(spec: SpecConfig) -> Any:
        config = EngineConfig(
            model=ModelConfig(model=str(directory), dtype="float64", max_model_len=1024, num_threads=1),
            cache=CacheConfig(block_size=4, num_kv_blocks=1024),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
            spec=spec,
        )

        return engine_starter(config, answers)

    drafting = SpecConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_min=1)
    with live_server_of(start_with(SpecConfig())) as plain, live_server_of(start_with(drafting)) as other:
        yield [plain, other]


def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_required_calls_are_valid_and_the_same_with_drafts(servers: list[LiveServer]) -> None:
    for seed in range(6):
        found = []
        for server in servers:
            with client(server) as sdk:
                answer = sdk.chat.completions.create(
                    model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
                    seed=seed, max_tokens=400,
                )  # fmt: skip
            (choice,) = answer.choices
            assert choice.finish_reason in ("tool_calls", "length")
            if choice.finish_reason == "tool_calls":
                ((name, arguments),) = calls_of(choice.message)
                if name == "make":
                    jsonschema.validate(json.loads(arguments), PARAMETERS)
                else:
                    assert (name, json.loads(arguments)) == ("now", {})
                assert choice.message.content is None
            assert answer.usage is not None
            found.append((calls_of(choice.message), choice.finish_reason, answer.usage.completion_tokens))
        assert found[0] == found[1]


def test_a_named_function_is_called_once(servers: list[LiveServer]) -> None:
    with client(servers[1]) as sdk:
        answer = sdk.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, seed=3, max_tokens=200,
            tool_choice={"type": "function", "function": {"name": "now"}},
        )  # fmt: skip
    assert [name for name, _ in calls_of(answer.choices[0].message)] == ["now"]


def test_a_stream_builds_the_same_calls(servers: list[LiveServer]) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "seed": 11, "max_tokens": 300,
    }  # fmt: skip
    with client(servers[1]) as sdk:
        whole = sdk.chat.completions.create(**fields)
        names: list[str] = []
        arguments: list[str] = []
        finish_reason = None
        for chunk in sdk.chat.completions.create(stream=True, **fields):
            for call in chunk.choices[0].delta.tool_calls or ():
                if call.id:
                    names.append(call.function.name)
                    arguments.append("")
                arguments[call.index] += call.function.arguments
            finish_reason = chunk.choices[0].finish_reason or finish_reason
    assert list(zip(names, arguments, strict=True)) == calls_of(whole.choices[0].message)
    assert finish_reason == whole.choices[0].finish_reason
