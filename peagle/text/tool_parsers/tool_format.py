"""What a family of models writes when it calls tools: the seam between formats and those who use them.

Owns the hand-offs. Refuses to know the families.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from peagle.text.answer_events import AnswerParser

_PLACE = "\x00"  # around the number of a schema; no string of a grammar can hold it as it is
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFunction:
    """A function that may be called. `parameters` is the JSON schema of its arguments; None: it has none."""

    name: str
    parameters: Mapping[str, Any] | None = None

    @property
    def title(self) -> str:
        """How errors speak of its schema."""
        return f"the parameters of '{self.name}'"

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema that its arguments are held to: always an object's."""
        return NO_ARGUMENTS if self.parameters is None else {"type": "object", **self.parameters}


@dataclass(slots=True)
class CallGrammar:
    """A Lark grammar in the making, for llguidance, with places for JSON schemas.

    Attributes:
        special_ids: special tokens by their text; a mark that is one is written by its id, as no text can spell it.
        rules: lines of the grammar.
        schemas: of the places.
        owners: whose each schema is, for errors.
    """

    special_ids: Mapping[str, int] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)
    schemas: list[Mapping[str, Any]] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)

    def mark(self, text: str) -> str:
        """`text` exactly, as a term."""
        token_id = self.special_ids.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def schema(self, schema: Mapping[str, Any], *, of: str) -> str:
        """JSON of a schema, as a term. `of` says whose it is, such as `the parameters of 'f'`."""
        self.schemas.append(schema)
        self.owners.append(of)
        return f"{_PLACE}{len(self.schemas) - 1}{_PLACE}"

    def rule(self, name: str, *alternatives: str) -> str:
        """Define a rule; returns its name."""
        self.rules.append(f"{name}: {' | '.join(alternatives)}")
        return name

    def until(self, name: str, mark: str) -> str:
        """A rule of any text up to the first `mark`, which is the end of it."""
        if not any(rule.startswith("ANY_TEXT:") for rule in self.rules):
            self.rules.append(r"ANY_TEXT: /(.|\n)*/")
        if mark in self.special_ids:
            return self.rule(name, f"ANY_TEXT {self.mark(mark)}")
        self.rules.append(f"{name}[lazy]: ANY_TEXT {self.mark(mark)}")
        return name

    @property
    def text(self) -> str:
        """What `GrammarSpec` of kind `tool_calls` holds."""
        return json.dumps({"rules": self.rules, "schemas": self.schemas, "owners": self.owners})


def insert_schemas(rule: str, terms: Sequence[str]) -> str:
    """A rule with the terms of its schemas in their places."""
    parts = rule.split(_PLACE)
    return "".join(part if index % 2 == 0 else terms[int(part)] for index, part in enumerate(parts))


class ToolFormat(Protocol):
    """How a family calls tools."""

    @property
    def name(self) -> str:
        """That it is chosen by."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """What must be left in the text, where it is a special token."""
        ...

    @property
    def begin(self) -> str | None:
        """Mark in front of each call, wherever in an answer; None: calls are the whole answer."""
        ...

    def parser(self) -> AnswerParser:
        """Reads one answer."""
        ...

    def define_body(self, grammar: CallGrammar, functions: Sequence[ToolFunction], *, has_several: bool) -> str:
        """Define a rule of what follows `begin`: one call of one of these functions. Where several calls share one
        mark, or there is none, all of them."""
        ...

    def separator(self) -> str | None:
        """Between two calls that each have their mark; None: there is one mark at most."""
        ...


def define_call_objects(
    grammar: CallGrammar, functions: Sequence[ToolFunction], *, arguments_key: str = "arguments"
) -> str:
    """A rule of one call as a JSON object."""
    alternatives = []
    for index, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{arguments_key}": '
        term = f"{json.dumps(head)} {grammar.schema(function.schema, of=function.title)} {json.dumps('}')}"
        alternatives.append(grammar.rule(f"call_{index}", term))
    return grammar.rule("call_object", *alternatives)
