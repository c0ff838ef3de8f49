"""A grammar with reasoning in front of it.

Owns the combination: what a model thinks is free text up to the end mark, and the grammar begins behind it. Refuses to
know what the grammar says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from peagle.grammar_spec import ReasoningPrefix


def behind_reasoning(grammar: str, reasoning: ReasoningPrefix, special_ids: Mapping[str, int]) -> str:
    """The grammar of answers that may think before they keep to `grammar`.

    Args:
        grammar: Lark, or llguidance's JSON of one grammar.
        reasoning: the marks.
        special_ids: special tokens by their text; a mark that is one is written by its id.
    """
    end = _terms(reasoning.end, special_ids)
    # A special token ends free text by itself; a mark of plain text does where it is first met.
    head = "thought" if end.startswith("<[") else "thought[lazy]"
    thought = "thought" if reasoning.is_open else f"{_terms(reasoning.begin, special_ids)} thought"
    answer = f"{_terms(reasoning.answer_begin, special_ids)} @answer"
    start = f"{thought} GAP {answer}" if reasoning.is_open else f"{answer} | {thought} GAP {answer}"
    rules = [f"start: {start}", f"{head}: ANY_TEXT {end}", r"ANY_TEXT: /(.|\n)*/", r"GAP: /[ \n]{0,4}/"]
    inner = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    main = {"name": "main", "lark_grammar": "\n".join(rules)}
    return json.dumps({"grammars": [main, {**inner, "name": "answer"}]})


def _terms(text: str, special_ids: Mapping[str, int]) -> str:
    """A mark as terms: special tokens by id, the text between them as it is."""
    known = sorted(special_ids, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, known)) + ")", text) if known else [text]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part) for part in parts if part)
