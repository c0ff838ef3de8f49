"""The language that an answer must belong to, as the client wrote it.

Owns the kinds of grammar that there are. Refuses to read them: whether the text is a valid schema or regular expression
is found out where it is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningPrefix:
    """Reasoning that an answer may begin with, and that its grammar says nothing about.

    Attributes:
        begin, end: marks around it.
        is_open: the prompt holds `begin`, so the answer begins in the middle of it.
        answer_begin: mark in front of what the grammar is about, reasoning or not.
    """

    begin: str
    end: str
    is_open: bool
    answer_begin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """One grammar.

    Attributes:
        kind: how `text` is to be read.
        text: a JSON schema, a regular expression, a JSON list of choices, a Lark or GBNF grammar; "" for json_object.
            For tool_calls, JSON of a Lark grammar's `rules` and of the `schemas` in it (`CallGrammar`).
        param: the field that it came in, for errors.
        reasoning: what the answer may begin with; None: nothing else.
    """

    kind: GrammarKind
    text: str
    param: str = field(default="response_format", compare=False)
    reasoning: ReasoningPrefix | None = None
