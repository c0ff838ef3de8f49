"""How a model's answers are read: which marks are around its reasoning, and how it calls tools.

Owns the choice by name or by what the chat template shows, the parser of an answer, and the grammar of answers that
must call a tool. Refuses to know requests: who offers which tools is said by its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from peagle.errors import ConfigError
from peagle.grammar_spec import ReasoningPrefix
from peagle.text.answer_events import AnswerParser, PlainAnswer
from peagle.text.reasoning import MISTRAL_THINK, REASONING_MARKS, THINK, ReasoningMarks, SplitReasoning
from peagle.text.tool_parsers import TOOL_FORMATS, CallGrammar, ToolFormat, ToolFunction
from peagle.text.tool_parsers.harmony import CHANNEL, END, MESSAGE, START, HarmonyFormat
from peagle.text.tool_parsers.llama3_json import PYTHON_TAG

AUTO, NONE = "auto", "none"
HARMONY = HarmonyFormat.name
REASONING_NAMES = (*REASONING_MARKS, HARMONY)
CallMode = Literal["auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What a family of models writes.

    Attributes:
        tools: how it calls tools; None: it can't be asked to.
        reasoning: marks around its reasoning; None: it has none, or `tools` reads it.
        has_channels: reasoning and calls are channels of one format.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningMarks | None = None
    has_channels: bool = False

    @classmethod
    def choose(cls, *, tool_call_parser: str, reasoning_parser: str, chat_template: str | None) -> AnswerFormat:
        """By name; `auto` goes by the chat template, and for tools falls back to `hermes`, which can be explained to
        any model. `none` reads nothing.

        Raises:
            ConfigError: there is no parser of that name.
        """
        source = chat_template or ""
        tools_name = _tools_of(source) if tool_call_parser == AUTO else tool_call_parser
        reasoning_name = _reasoning_of(source) if reasoning_parser == AUTO else reasoning_parser
        if tools_name != NONE and tools_name not in TOOL_FORMATS:
            raise _unknown("tool_call_parser", tools_name, TOOL_FORMATS)
        if reasoning_name != NONE and reasoning_name not in REASONING_NAMES:
            raise _unknown("reasoning_parser", reasoning_name, REASONING_NAMES)
        return cls(
            tools=TOOL_FORMATS.get(tools_name),
            reasoning=REASONING_MARKS.get(reasoning_name),
            has_channels=HARMONY in (tools_name, reasoning_name),
        )

    @property
    def has_reasoning(self) -> bool:
        """True if answers may have reasoning in them."""
        return self.reasoning is not None or self.has_channels

    def marks(self, *, has_tools: bool) -> frozenset[str]:
        """Marks that must be left in the text even where they are special tokens."""
        found: set[str] = set()
        if self.has_channels:
            found |= set(TOOL_FORMATS[HARMONY].marks)
        if self.reasoning is not None:
            found |= {self.reasoning.begin, self.reasoning.end}
        if has_tools and self.tools is not None:
            found |= set(self.tools.marks)
        return frozenset(found)

    def parser(self, *, prompt_end: str, has_tools: bool) -> AnswerParser:
        """Reads one answer.

        Args:
            prompt_end: the end of the prompt's text, which may leave the model in the middle of its reasoning.
            has_tools: calls are looked for.
        """
        if self.has_channels:
            return TOOL_FORMATS[HARMONY].parser()
        answer = self.tools.parser() if has_tools and self.tools is not None else PlainAnswer()
        if self.reasoning is None:
            return answer
        return SplitReasoning(self.reasoning, answer, is_open=self.reasoning.is_open_after(prompt_end))

    def call_grammar(
        self,
        functions: Sequence[ToolFunction],
        *,
        mode: CallMode,
        has_several: bool,
        special_ids: Mapping[str, int],
        otherwise: Mapping[str, Any] | None = None,
    ) -> str:
        """The grammar of answers with calls of these functions, as `GrammarSpec` of kind `tool_calls` holds it.

        Args:
            functions: that may be called.
            mode: `required`: nothing but calls, `auto`: text, and calls in it.
            has_several: more than one call is allowed.
            special_ids: the tokenizer's special tokens by their text.
            otherwise: in mode `auto`, the schema of an answer without calls; None: any text, with calls in it.
        """
        assert self.tools is not None
        grammar = CallGrammar(special_ids=special_ids)
        body = self.tools.define_body(grammar, functions, has_several=has_several)
        if mode == "required":
            calls = self._required(grammar, body, has_several=has_several)
        elif otherwise is not None:
            schema = grammar.schema(otherwise, of="the format of the answer")
            calls = f"{self._required(grammar, body, has_several=has_several)} | {schema}"
        else:
            calls = self._in_text(grammar, body)
        grammar.rule("start", calls)
        return grammar.text

    def _required(self, grammar: CallGrammar, body: str, *, has_several: bool) -> str:
        assert self.tools is not None
        begin, separator = self.tools.begin, self.tools.separator()
        one = body if begin is None else grammar.rule("marked_call", f"{grammar.mark(begin)} {body}")
        if not has_several or separator is None:
            return one
        return grammar.rule("all_calls", f"{one} ({grammar.mark(separator)} {one})*")

    def _in_text(self, grammar: CallGrammar, body: str) -> str:
        assert self.tools is not None
        if self.tools.begin is None:
            grammar.rules.append(r"OTHER_TEXT: /[^\{\[<\s](.|\n)*/")
            return grammar.rule("text_or_calls", "OTHER_TEXT", body, '""')
        before = grammar.until("text_before", self.tools.begin)
        grammar.rule("text_and_call", f"{before} {body}")
        return grammar.rule("text_and_calls", "text_and_call* ANY_TEXT")

    def reasoning_prefix(self, prompt_end: str, *, of_calls: bool = False) -> ReasoningPrefix | None:
        """What a grammar has to let pass before it begins.

        Args:
            prompt_end: as in `parser`.
            of_calls: the grammar is one of `call_grammar`, which knows the channels itself.
        """
        if self.has_channels and of_calls:
            return None
        if self.has_channels:
            return ReasoningPrefix(
                begin=f"{CHANNEL}analysis{MESSAGE}",
                end=f"{END}{START}assistant",
                is_open=False,
                answer_begin=f"{CHANNEL}final{MESSAGE}",
            )
        marks = self.reasoning
        if marks is None:
            return None
        return ReasoningPrefix(begin=marks.begin, end=marks.end, is_open=marks.is_open_after(prompt_end))


def _tools_of(template: str) -> str:
    """The format of tool calls that a chat template speaks of."""
    if CHANNEL in template:
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_start|>" in template:
        return "pythonic"
    if PYTHON_TAG in template or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    return "hermes"


def _reasoning_of(template: str) -> str:
    """The marks of reasoning that a chat template speaks of."""
    if CHANNEL in template:
        return HARMONY
    for marks in (THINK, MISTRAL_THINK):
        if marks.end in template:
            return marks.name
    return NONE


def _unknown(name: str, value: str, known: Sequence[str] | Mapping[str, object]) -> ConfigError:
    return ConfigError(f"{name} must be one of {AUTO}, {NONE}, {', '.join(known)}; got {value!r}")
