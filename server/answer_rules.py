"""What the answer to a conversation is held to: its grammar, and the marks that have to be seen in its text.

Owns how tools, the answer's format and reasoning go together. Refuses to know how a family of models writes them
(`AnswerFormat`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from peagle import GrammarSpec, SamplingParams
from peagle.errors import InvalidParameterError
from peagle.text import AnswerFormat, Tokenizer, ToolFunction
from server.schemas.chat import ChatCompletionRequest

_JSON_KINDS = ("json_object", "json_schema")


def hold_answer(
    params: SamplingParams, body: ChatCompletionRequest, *, answers: AnswerFormat, tokenizer: Tokenizer, prompt_end: str
) -> SamplingParams:
    """`params` with the grammar that the request asks for, if it asks for one.

    Args:
        params: with the grammar of the answer's format alone.
        body: what was asked.
        answers: of the model.
        tokenizer: of the model.
        prompt_end: the end of the prompt's text.

    Raises:
        InvalidParameterError: the model can't call tools, or tools and format don't go together.
    """
    if body.tool_mode != "none" and answers.tools is None:
        raise InvalidParameterError(
            "This server was started with --tool-call-parser none, so it serves no tools: leave 'tools' out, or send "
            "'tool_choice': 'none'.",
            param="tools",
            code="unsupported_parameter",
        )
    calls = _calls(params.grammar, body, answers, tokenizer)
    grammar = params.grammar if calls is None else calls
    if grammar is not None:
        grammar = replace(grammar, reasoning=answers.reasoning_prefix(prompt_end, of_calls=calls is not None))
    marks = answers.marks(has_tools=body.tool_mode != "none")
    return replace(params, grammar=grammar, visible_special_tokens=marks)


def _calls(
    own: GrammarSpec | None, body: ChatCompletionRequest, answers: AnswerFormat, tokenizer: Tokenizer
) -> GrammarSpec | None:
    """The grammar of an answer that may or must call tools; None if its calls, or everything, are left to the model."""
    mode = body.tool_mode
    is_strict = any(tool.function.strict for tool in body.offered_tools)
    if mode == "none" or (mode == "auto" and own is None and not is_strict):
        return None
    if mode == "auto" and answers.has_channels:
        raise InvalidParameterError(
            "With this model's format, functions can be strict or go together with a format of the answer only if one "
            "must be called: send 'tool_choice': 'required', or leave 'strict' and the format out.",
            param="tools",
            code="unsupported_parameter",
        )
    if mode == "auto" and own is not None and own.kind not in _JSON_KINDS:
        raise InvalidParameterError(
            "'tools' go together with JSON as the format of the answer, and with no other: send 'tool_choice': 'none' "
            "or 'required'.",
            param="tools",
            code="invalid_combination",
        )
    text = answers.call_grammar(
        [ToolFunction(name=tool.function.name, parameters=tool.function.parameters) for tool in body.offered_tools],
        mode="auto" if mode == "auto" else "required",
        has_several=mode != "named" and body.parallel_tool_calls is not False,
        special_ids=tokenizer.special_ids,
        otherwise=_schema(own) if mode == "auto" and own is not None else None,
    )
    return GrammarSpec(kind="tool_calls", text=text, param="tools")


def _schema(own: GrammarSpec) -> dict[str, Any]:
    """The schema of an answer that calls nothing."""
    return dict(json.loads(own.text)) if own.kind == "json_schema" else {"type": "object"}
