"""Grammars of tool calls: what each format's grammar lets pass is what its parser reads, and nothing else passes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peagle.errors import InvalidParameterError
from peagle.grammar.compiler import GrammarCompiler
from peagle.grammar_spec import GrammarSpec, ReasoningPrefix
from peagle.text import Tokenizer
from peagle.text.answer_events import ToolCallArguments, ToolCallStart
from peagle.text.answer_format import AnswerFormat, CallMode
from peagle.text.tool_parsers import TOOL_FORMATS, ToolFunction
from tests.builders.server import tiny_tokenizer

WEATHER = ToolFunction(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = ToolFunction(name="now")
PASSES = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "A"}}\n</tool_call>',
    ],
    "llama3_json": [
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
    ],
    "mistral": ['[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "A"}}]'],
    "pythonic": ['[get_weather(city="Oslo", days=3), now()]', '[get_weather(city="é")]'],
    "harmony": [
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    ],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def grammar(name: str, tokenizer: Tokenizer, *, mode: CallMode = "required", has_several: bool = True) -> GrammarSpec:
    text = AnswerFormat(tools=TOOL_FORMATS[name]).call_grammar(
        [WEATHER, NOW], mode=mode, has_several=has_several, special_ids=tokenizer.special_ids
    )
    return GrammarSpec(kind="tool_calls", text=text, param="tools")


def passes(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> bool:
    matcher = compiler.compile(spec)
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), min(tokenizer.eos_token_ids)]
    return len(matcher.allowed_nodes(token_ids, range(-1, len(token_ids) - 1))) == len(token_ids)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in PASSES.items() for text in texts])
def test_what_passes_is_read_as_calls_with_valid_arguments(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, text: str
) -> None:
    assert passes(compiler, tokenizer, grammar(name, tokenizer), text)
    parser = TOOL_FORMATS[name].parser()
    events = [*parser.feed(text), *parser.finish()]
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    assert names
    for index, called in enumerate(names):
        pieces = [e.delta for e in events if isinstance(e, ToolCallArguments) and e.index == index]
        arguments: dict[str, Any] = json.loads("".join(pieces))
        assert set(arguments) <= {"city", "days"}
        assert ("city" in arguments) == (called == "get_weather")


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("change", [("Oslo", 'Oslo", "x": "'), ("now", "then"), ("get_weather", "get_whether")])
def test_other_functions_and_other_arguments_do_not_pass(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, change: tuple[str, str]
) -> None:
    spec = grammar(name, tokenizer)
    changed = [text.replace(*change) for text in PASSES[name]]
    assert any(text not in PASSES[name] for text in changed) or name == "mistral"
    for text in changed:
        assert passes(compiler, tokenizer, spec, text) == (text in PASSES[name])


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_one_call_only_where_several_are_not_wanted(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    several = next(text for text in PASSES[name] if text.count("now") + text.count("get_weather") > 1)
    assert not passes(compiler, tokenizer, grammar(name, tokenizer, has_several=False), several)


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "pythonic"])
def test_with_a_choice_text_passes_and_a_call_must_be_right(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    spec = grammar(name, tokenizer, mode="auto")
    assert passes(compiler, tokenizer, spec, "It is warm, a < b.\n")
    for text in PASSES[name]:
        assert passes(compiler, tokenizer, spec, text)
        assert not passes(compiler, tokenizer, spec, text.replace("get_weather", "x").replace("now", "x"))
    if name in ("hermes", "mistral"):
        assert passes(compiler, tokenizer, spec, f"I'll look. {PASSES[name][0]}")


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ('{"a": 1}', False, True),
        ('<think>Hm. {"</think>\n\n{"a": 1}', False, True),
        ('Hm.</think>{"a": 1}', True, True),
        ('{"a": 1}', True, False),
        ("<think>Hm.</think>no", False, False),
    ],
)
def test_a_grammar_begins_behind_the_reasoning(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, is_open: bool, expected: bool
) -> None:
    reasoning = ReasoningPrefix(begin="<think>", end="</think>", is_open=is_open)
    for kind, language in (("json_object", ""), ("regex", r"\{.*\}"), ("choice", '["{\\"a\\": 1}"]')):
        spec = GrammarSpec(kind=kind, text=language, reasoning=reasoning)  # type: ignore[arg-type]
        assert passes(compiler, tokenizer, spec, text) == expected


def test_special_tokens_are_marks_by_their_id(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    one = two = "<|im_start|>"
    reasoning = ReasoningPrefix(begin=f"{one}a", end=f"{two}b", is_open=False, answer_begin=one)
    spec = GrammarSpec(kind="regex", text="x+", reasoning=reasoning)
    assert passes(compiler, tokenizer, spec, f"{one}a thought{two}b\n{one}xx")
    assert passes(compiler, tokenizer, spec, f"{one}xx")
    assert not passes(compiler, tokenizer, spec, "xx")


def test_a_function_that_cannot_be_held_to_its_parameters_is_refused(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    bad = ToolFunction(name="f", parameters={"type": "object", "properties": {"a": {"type": "strin"}}})
    text = AnswerFormat(tools=TOOL_FORMATS["hermes"]).call_grammar(
        [bad], mode="required", has_several=True, special_ids={}
    )
    with pytest.raises(InvalidParameterError, match=r"parameters of 'f' cannot be used: .*strin$") as caught:
        compiler.compile(GrammarSpec(kind="tool_calls", text=text, param="tools"))
    assert caught.value.param == "tools"
