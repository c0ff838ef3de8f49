"""Grammars of strangers: what is wrong is said, and nothing takes the process or much time with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peagle.errors import InvalidParameterError
from peagle.grammar.compiler import MAX_CHOICES, MAX_RULES, MAX_TEXT, GrammarCompiler
from peagle.grammar_spec import GrammarKind, GrammarSpec
from tests.builders.server import tiny_tokenizer


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer())


def chain_of_references(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": definitions | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def chain_of_rules(length: int) -> str:
    return "\n".join([*(f"r{i}: r{i + 1}" for i in range(length)), f'r{length}: "a"', "start: r0"])


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BAD: list[tuple[GrammarKind, str, str]] = [
    ("json_schema", "{", "not JSON"),
    ("json_schema", "[1]", ""),
    ("json_schema", '{"type": "foo"}', "foo"),
    ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
    ("json_schema", '{"$ref": "#/$defs/none"}', ""),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"$ref": "#"}', "no answer"),
    ("json_schema", '{"type": "string", "pattern": "["}', ""),
    ("json_schema", json.dumps(nested(300)), ""),
    ("json_schema", json.dumps(chain_of_references(MAX_RULES + 1)), "references"),
    ("json_schema", "[" * 100_000, "not JSON"),
    ("regex", "[", "unclosed"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "(" * 10_000 + "a" + ")" * 10_000, ""),
    ("grammar", "start: foo", "foo"),
    ("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "nested"),
    ("grammar", chain_of_rules(5000), "rules"),
    ("grammar", "root ::= (", ""),
    ("choice", json.dumps(["a", ""]), "empty"),
    ("choice", json.dumps([str(i) for i in range(MAX_CHOICES + 1)]), "choices"),
    ("regex", "a" * (MAX_TEXT + 1), "longer"),
]


@pytest.mark.parametrize(("kind", "text", "reason"), BAD, ids=lambda value: str(value)[:30])
def test_a_bad_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, reason: str
) -> None:
    with pytest.raises(InvalidParameterError, match=r"cannot be used") as refused:
        compiler.compile(GrammarSpec(kind=kind, text=text, param="structured_outputs.x"))
    assert reason in str(refused.value)
    assert refused.value.param == "structured_outputs.x"
    assert len(str(refused.value)) < 400


GOOD: list[tuple[GrammarKind, str]] = [
    ("json_object", ""),
    ("json_schema", "{}"),
    ("json_schema", "true"),
    ("json_schema", json.dumps(chain_of_references(MAX_RULES - 1))),
    ("json_schema", json.dumps({"enum": [f"v{i}" for i in range(5000)]})),
    ("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000})),
    ("regex", "(a+)+b"),
    ("regex", "(a{1,100}){1,100}"),
    ("regex", "(.*a){30}"),
    ("regex", r"[\s\S]{0,100000}x"),
    ("grammar", chain_of_rules(MAX_RULES - 2)),
    ("grammar", 'root ::= "a" root | "b"'),
    ("grammar", 'start: start start | "a"'),
    ("choice", json.dumps([f"choice {i}" for i in range(MAX_CHOICES)])),
]


@pytest.mark.parametrize(("kind", "text"), GOOD, ids=lambda value: str(value)[:30])
def test_hostile_and_harmless(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    matcher = compiler.compile(GrammarSpec(kind=kind, text=text))
    assert matcher.masks([], []).any()
    assert matcher.error is None


def test_a_compiled_grammar_is_fresh_each_time(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec(kind="choice", text='["yes", "no"]')
    first = compiler.compile(spec)
    assert first.advance(list(b"yes"))
    assert first.is_complete
    second = compiler.compile(spec)
    assert not second.is_complete
    assert second.advance(list(b"no"))
