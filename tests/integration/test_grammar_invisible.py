"""Answers held to a grammar: always in the language or cut by length, and the same whatever drafts.

A tiny random model at a high temperature says what it likes, so only the masks keep it in the language. The number of
random schemas and regular expressions is small here; `PEAGLE_NUM_SCHEMAS` asks for more.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle import FinishReason, GrammarSpec, LLMEngine, RequestInput, SamplingParams, SpecConfig
from peagle.errors import InvalidParameterError
from peagle.grammar.compiler import GrammarCompiler
from tests.builders.engine import make_engine, write_checkpoint
from tests.builders.head import TINY_TARGET, write_tiny_head
from tests.builders.server import tiny_tokenizer

NUM_SCHEMAS = int(os.environ.get("PEAGLE_NUM_SCHEMAS", "60"))
MAX_TOKENS = 40
COMPILER = GrammarCompiler(tiny_tokenizer())
LONGER: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 256}
CALM = settings(
    max_examples=NUM_SCHEMAS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("grammar"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> LLMEngine:
    return make_engine(checkpoint, spec=SpecConfig(num_speculative_tokens=0), **LONGER)


@pytest.fixture(scope="module")
def fast(checkpoint: Path) -> LLMEngine:
    """Four drafts a step, looked up in what was said before: most are forbidden by a grammar."""
    spec = SpecConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, adaptive_verification=False)
    return make_engine(checkpoint, spec=spec, **LONGER)


def ask(engine: LLMEngine, grammar: GrammarSpec, *, seed: int = 0, **params: Any) -> tuple[str, FinishReason]:
    """Text and end of an answer."""
    values = {"temperature": 1.5, "max_tokens": MAX_TOKENS, "seed": seed} | params
    request = RequestInput(
        request_id="r",
        prompt_token_ids=list(b'{"a": [1, 2], "b": "x"}'),
        params=SamplingParams(grammar=grammar, **values),
    )
    engine.add_request(request)
    text, reason = "", None
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            text, reason = text + output.text, output.finish_reason
    engine.check_integrity()
    assert reason is not None
    return text, reason


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Small schemas of the kinds that people send."""
    scalar: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": -5, "maximum": 17},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string"},
            {"type": "string", "maxLength": 5},
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"enum": ["x", "yy", 3, None]},
            {"const": {"a": 1}},
            {"type": ["integer", "null"]},
        ]
    )
    names = st.sampled_from(["a", "b", "long name", "ü"])

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        objects = st.dictionaries(names, inner, max_size=3).flatmap(
            lambda properties: st.builds(
                lambda required, extra: {
                    "type": "object",
                    "properties": properties,
                    "required": [name for name in properties if name in required],
                    "additionalProperties": extra,
                },
                st.sets(names),
                st.booleans(),
            )
        )
        arrays = st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)
        )
        return objects | arrays | st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner)

    return st.recursive(scalar, grow, max_leaves=6)


def check_json(text: str, reason: FinishReason, schema: Any) -> None:
    if reason is FinishReason.STOP:
        jsonschema.validate(json.loads(text), schema)
    else:
        assert reason is FinishReason.LENGTH


@CALM
@given(schema=schemas(), seed=st.integers(0, 1000))
def test_random_schemas(plain: LLMEngine, fast: LLMEngine, schema: dict[str, Any], seed: int) -> None:
    grammar = GrammarSpec(kind="json_schema", text=json.dumps(schema))
    text, reason = ask(plain, grammar, seed=seed)
    check_json(text, reason, schema)
    assert ask(fast, grammar, seed=seed) == (text, reason)


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Values that fit, their properties in the schema's order and none beside them."""
    if "anyOf" in schema:
        return st.one_of([values(one) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    kind = schema["type"]
    if kind == "object":
        known = {
            name: values(one) if name in schema["required"] else st.just(...) | values(one)
            for name, one in schema["properties"].items()
        }
        return st.fixed_dictionaries(known).map(
            lambda found: {name: found[name] for name in schema["properties"] if found[name] is not ...}
        )
    if kind == "array":
        return st.lists(values(schema["items"]), max_size=schema["maxItems"])
    scalars: dict[str, st.SearchStrategy[Any]] = {
        "integer": st.integers(schema.get("minimum", -(10**9)), schema.get("maximum", 10**9)),
        "number": st.integers(-999, 999) | st.decimals(-99, 99, places=2).map(float),
        "boolean": st.booleans(),
        "null": st.none(),
        "string": st.from_regex(schema["pattern"], fullmatch=True)
        if "pattern" in schema
        else st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=schema.get("maxLength", 9)),
    }
    return scalars["integer"] | scalars["null"] if isinstance(kind, list) else scalars[kind]


@CALM
@given(data=st.data())
def test_what_fits_a_schema_is_allowed(data: st.DataObject) -> None:
    """The other direction: a grammar that forbids what its schema allows would be safe, and useless."""
    schema = data.draw(schemas())
    value = data.draw(values(schema))
    jsonschema.validate(value, schema)
    for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, indent=1)):
        matcher = COMPILER.compile(GrammarSpec(kind="json_schema", text=json.dumps(schema)))
        assert matcher.advance(list(text.encode())), text
        assert matcher.is_complete


PIECES = st.sampled_from(["a", "b", "[a-d]", "[^x]", ".", "[0-9]", "[a-z0-9_]", "é", "(ab|c)", "x"])
regexes = st.lists(st.tuples(PIECES, st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}"])), min_size=1, max_size=5).map(
    lambda pieces: "".join(piece + times for piece, times in pieces)
)


@CALM
@given(regex=regexes, seed=st.integers(0, 1000))
def test_random_regexes(plain: LLMEngine, fast: LLMEngine, regex: str, seed: int) -> None:
    grammar = GrammarSpec(kind="regex", text=regex)
    text, reason = ask(plain, grammar, seed=seed)
    if reason is FinishReason.STOP:
        assert re.fullmatch(regex, text, re.DOTALL | re.ASCII) or re.fullmatch(regex, text, re.DOTALL)
    assert ask(fast, grammar, seed=seed) == (text, reason)


def test_choices_and_objects(plain: LLMEngine, fast: LLMEngine) -> None:
    words = ['say "no"', "back\\slash", "new\nline", "ü🙂"]
    for seed in range(20):
        choice = GrammarSpec(kind="choice", text=json.dumps(words))
        text, reason = ask(plain, choice, seed=seed)
        assert text in words
        assert reason is FinishReason.STOP
        assert ask(fast, choice, seed=seed) == (text, reason)
        anything = GrammarSpec(kind="json_object", text="")
        text, reason = ask(fast, anything, seed=seed)
        check_json(text, reason, {"type": "object"})
        assert ask(plain, anything, seed=seed) == (text, reason)


def test_with_other_parameters(plain: LLMEngine, fast: LLMEngine) -> None:
    """A grammar is stronger than the others: a forced token is said even if they forbid it."""
    grammar = GrammarSpec(kind="regex", text="(ab|cd){3}")
    others: list[dict[str, Any]] = [
        {"frequency_penalty": 2.0, "logprobs": 3},
        {"logit_bias": ((ord("a"), -100.0),)},
        {"min_tokens": 30},
        {"bad_words": ((ord("a"), ord("b")),)},
        {"temperature": 0.0},
        {"stop": ("d",)},
    ]
    for params in others:
        text, reason = ask(plain, grammar, **params)
        assert reason is FinishReason.STOP
        if "stop" not in params:
            assert re.fullmatch("(ab|cd){3}", text)
        assert ask(fast, grammar, **params) == (text, reason)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_drafts_keep_to_it(checkpoint: Path, tmp_path: Path, method: str) -> None:
    """With R2 and R3 drafts are not cut: whether they are verified must not depend on what they are."""
    values = {
        "model": str(write_tiny_head(tmp_path / "head", TINY_TARGET)),
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": method,
    }
    engine = make_engine(checkpoint, spec=SpecConfig.from_mapping(values), **LONGER)
    for seed in range(30):
        text, reason = ask(engine, GrammarSpec(kind="regex", text="[a-c]{5,15}"), seed=seed)
        assert reason is FinishReason.STOP
        assert re.fullmatch("[a-c]{5,15}", text)
    assert engine.stats().spec_decode.num_draft_tokens > 0


def test_ignoring_the_end_is_refused(plain: LLMEngine) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        ask(plain, GrammarSpec(kind="json_object", text=""), ignore_eos=True)
    assert refused.value.param == "ignore_eos"
