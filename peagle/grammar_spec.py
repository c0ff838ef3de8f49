"""The language that an answer must belong to, as the client wrote it.

Owns the kinds of grammar that there are. Refuses to read them: whether the text is a valid schema or regular expression
is found out where it is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """One grammar.

    Attributes:
        kind: how `text` is to be read.
        text: a JSON schema, a regular expression, a JSON list of choices, a Lark or GBNF grammar; "" for json_object.
        param: the field that it came in, for errors.
    """

    kind: GrammarKind
    text: str
    param: str = field(default="response_format", compare=False)
