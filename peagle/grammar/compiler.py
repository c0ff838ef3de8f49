"""From what a client wrote to something that follows an answer, within limits of time and memory.

Owns the limits, the error messages, and a cache of what was compiled. A grammar comes from a stranger, and llguidance
recurses over rules and references: thousands of them in a row overflow the stack and take the process with them. So
their number is counted before anything is compiled. Everything else is bounded by llguidance's own limits, which count
work instead of seconds. Refuses to know sequences and sampling.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from peagle.errors import InvalidParameterError
from peagle.grammar.matcher import GrammarMatcher
from peagle.grammar.reasoning_grammar import behind_reasoning
from peagle.grammar_spec import GrammarSpec
from peagle.text.tokenizer import Tokenizer
from peagle.text.tool_parsers.tool_format import insert_schemas

MAX_TEXT = 256 * 1024  # characters of a grammar
MAX_RULES = 256  # rules of a grammar, or references in a schema; 3,000 in a row overflow a stack of 8 MB
MAX_CHOICES = 10_000
_MAX_CACHED = 64
# Small models can go on with line breaks and spaces for ever; this is as much as a deep indentation needs.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_MAX_MESSAGE = 300
_MAX_LEXER_STATES = 20_000  # 1 to 2 kB each


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be called from any thread.

    Args:
        tokenizer: of the target.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """A matcher at the beginning of an answer. The first grammar takes 0.2 s longer; most take a millisecond.

        Raises:
            InvalidParameterError: the grammar is invalid, too large, or uses what is not supported; `param` is
                `spec.param`.
        """
        with self._lock:
            compiled = self._compiled.get(spec)
        if compiled is None:
            compiled = self._compile(spec)  # without the lock: the engine's thread must not wait for a large one
        with self._lock:
            self._compiled[spec] = compiled
            self._compiled.move_to_end(spec)
            while len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        tokenizer = self._tokenizer
        return GrammarMatcher(
            compiled.deep_copy(), vocab_size=tokenizer.vocab_size, end_token_ids=tokenizer.eos_token_ids
        )

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        if len(spec.text) > MAX_TEXT:
            raise _invalid(spec, f"it is longer than {MAX_TEXT} characters")
        grammar = _grammar_text(spec)
        if spec.reasoning is not None:
            grammar = behind_reasoning(grammar, spec.reasoning, self._tokenizer.special_ids)
        with self._lock:
            vocabulary = self._vocabulary = self._vocabulary or make_vocabulary(self._tokenizer)
        matcher = LLMatcher(
            vocabulary,
            grammar,
            log_level=0,
            limits=LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False),
        )
        error = matcher.get_error()
        if not error:
            matcher.compute_bitmask()  # shows what only matching finds: that nothing at all is allowed
            error = "no answer could match it" if matcher.is_error() else ""
            if not error and not matcher.reset():
                error = matcher.get_error()
        if error:
            raise _invalid(spec, error)
        return matcher


def make_vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The tokenizer's tokens as bytes, as llguidance wants them."""
    return LLTokenizer(
        TokenizerWrapper(_Tokens(tokenizer)), n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eos_token_ids)
    )


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _grammar_text(spec: GrammarSpec) -> str:
    """What llguidance compiles.

    Raises:
        InvalidParameterError: see `GrammarCompiler.compile`.
    """
    if spec.kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides={"whitespace_pattern": _WHITESPACE})
    if spec.kind == "json_schema":
        return _schema_text(spec)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return _choice_text(spec)
    if spec.kind == "tool_calls":
        return _tool_calls_text(spec)
    return _context_free_text(spec)


def _schema_text(spec: GrammarSpec) -> str:
    try:
        schema = json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise _invalid(spec, f"it is not JSON: {error}") from error
    if _count_references(schema) > MAX_RULES:
        raise _invalid(spec, f"it has more than {MAX_RULES} references")
    try:
        text = "{}" if schema is True else spec.text  # options want an object
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
    except ValueError as error:
        raise _invalid(spec, str(error)) from error


def _tool_calls_text(spec: GrammarSpec) -> str:
    parts = json.loads(spec.text)  # ours, but for the schemas in it
    terms = []
    for schema, owner in zip(parts["schemas"], parts["owners"], strict=True):
        if _count_references(schema) > MAX_RULES:
            raise _refused(spec, owner, f"it has more than {MAX_RULES} references")
        text = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})
        error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
        if error:  # of the whole grammar, the error would show rules that the client has not written
            raise _refused(spec, owner, error)
        terms.append(f"%json {text}")
    return LLMatcher.grammar_from_lark("\n".join(insert_schemas(rule, terms) for rule in parts["rules"]))


def _choice_text(spec: GrammarSpec) -> str:
    choices = json.loads(spec.text)
    if len(choices) > MAX_CHOICES:
        raise _invalid(spec, f"it has more than {MAX_CHOICES} choices")
    if not all(choices):
        raise _invalid(spec, "a choice must not be empty")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def _context_free_text(spec: GrammarSpec) -> str:
    num_rules = spec.text.count(":")  # a Lark rule has one, a GBNF rule `::=` two; literals may have more
    if num_rules > 2 * MAX_RULES:
        raise _invalid(spec, f"it has more than {MAX_RULES} rules")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
    except Exception as error:  # the converter raises whatever its parser does
        raise _invalid(spec, str(error)) from error


def _count_references(schema: Any) -> int:
    count, waiting = 0, [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            count += "$ref" in part or "$dynamicRef" in part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
    return count


def _invalid(spec: GrammarSpec, reason: str) -> InvalidParameterError:
    return _refused(spec, f"the {spec.kind.replace('_', ' ')}", reason)


def _refused(spec: GrammarSpec, what: str, reason: str) -> InvalidParameterError:
    words = " ".join(reason.split())
    shown = words if len(words) <= _MAX_MESSAGE else words[:_MAX_MESSAGE] + "..."
    return InvalidParameterError(f"{what} cannot be used: {shown}", param=spec.param)
