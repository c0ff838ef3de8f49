"""Every format: what is found in an answer, and that it does not show in which pieces the answer came."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.text.answer_events import (
    AnswerEvent,
    AnswerParser,
    ContentDelta,
    PlainAnswer,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from peagle.text.reasoning import THINK, SplitReasoning
from peagle.text.tool_parsers import TOOL_FORMATS


@dataclass(slots=True)
class Read:
    """An answer, put together from its events."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, events: list[AnswerEvent]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    assert text
                    self.content += text
                case ReasoningDelta(text):
                    assert text
                    self.reasoning += text
                case ToolCallStart(index, call_id, name):
                    assert index == len(self.calls), "calls are numbered in order"
                    self.calls.append((name, ""))
                    self.ids.append(call_id)
                case ToolCallArguments(index, delta):
                    assert index == len(self.calls) - 1, "one call at a time"
                    assert delta
                    self.calls[index] = (self.calls[index][0], self.calls[index][1] + delta)

    @property
    def seen(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.content, self.reasoning, self.calls


def read(parser: AnswerParser, pieces: list[str]) -> Read:
    found = Read()
    for piece in pieces:
        found.add(parser.feed(piece))
    found.add(parser.finish())
    assert len(set(found.ids)) == len(found.ids)
    return found


def call(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


WEATHER = '{"city": "Oslo \\"}{\\" é", "days": [1, {"a": null}]}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>'
H = "<|channel|>analysis<|message|>Let me look.<|end|><|start|>assistant"

# format, answer, content, reasoning, calls
CASES: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text, a < b.\n", "Just text, a < b.\n", "", []),
    ("hermes", HERMES, "", "", [("weather", WEATHER)]),
    ("hermes", f"I'll look.\n{HERMES}\n{HERMES}\n", "I'll look.", "", [("weather", WEATHER)] * 2),
    ("hermes", f"{HERMES} and then", "and then", "", [("weather", WEATHER)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "id": "7", "parameters": {}}</tool_call>', "", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", "", [("f", "{}")]),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", "", [("f", '{"a": 1}')]),
    ("hermes", f"{HERMES[:-12]}{HERMES}", "", "", [("weather", WEATHER)] * 2),  # the end mark was left out
    ("hermes", "<tool_call>\nnot json\n</tool_call>", "<tool_call>\nnot json\n</tool_call>", "", []),
    ("hermes", '<tool_call>{"a": 1}</tool_call> x', '<tool_call>{"a": 1}</tool_call> x', "", []),
    ("hermes", HERMES[:-30], "", "", [("weather", WEATHER[: len(WEATHER) - 30 + 14])]),  # cut in its arguments
    ("hermes", '<tool_call>\n{"na', '<tool_call>\n{"na', "", []),
    ("hermes", "x <tool_", "x <tool_", "", []),
    ("hermes", "  \n", "  \n", "", []),
    ("llama3_json", "Hello {you}", "Hello {you}", "", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": "b"}}', "", "", [("f", '{"a": "b"}')]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", "", [("f", "{}")]),
    (
        "llama3_json",
        ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', "", []),
    ("llama3_json", '{"na', '{"na', "", []),
    ("llama3_json", "<|python", "<|python", "", []),
    ("mistral", "No call.", "No call.", "", []),
    ("mistral", f"[TOOL_CALLS][{call('f', a=1)}, {call('g')}]", "", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", f"Wait. [TOOL_CALLS] [{call('f', a=1)}]", "Wait.", "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g{}', "", "", [("f", '{"a": "]"}'), ("g", "{}")]),
    ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", "", []),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", "", []),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a', "", "", [("f", '{"a')]),
    ("pythonic", "Plain [text](link)", "Plain [text](link)", "", []),
    ("pythonic", "[1, 2]", "[1, 2]", "", []),
    (
        "pythonic",
        "[f(a=1, b='x, )', c=[True, None, {'k': 2.5}]), m.g()]",
        "",
        "",
        [("f", '{"a": 1, "b": "x, )", "c": [true, null, {"k": 2.5}]}'), ("m.g", "{}")],
    ),
    ("pythonic", "[f(a=true, b=other)]", "", "", [("f", '{"a": true, "b": "other"}')]),
    ("pythonic", "<|python_start|>[f()]<|python_end|>", "", "", [("f", "{}")]),
    ("pythonic", "[f(a=1, b='cut", "", "", [("f", '{"a": 1')]),
    ("harmony", f"{H}<|channel|>final<|message|>Hello <b>", "Hello <b>", "Let me look.", []),
    (
        "harmony",
        f'{H}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>',
        "",
        "Let me look.",
        [("f", '{"a": 1}')],
    ),
    (
        "harmony",
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
        "",
        "",
        [("f", '{"a": 1}')],
    ),
    ("harmony", "<|channel|>commentary<|message|>First this.<|end|>", "First this.", "", []),
    ("harmony", "no format at all", "no format at all", "", []),
    ("harmony", "<|channel|>fin", "", "", []),
]


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), CASES)
def test_what_an_answer_says(name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, str]]) -> None:
    assert read(TOOL_FORMATS[name].parser(), [text]).seen == (content, reasoning, calls)
    assert read(TOOL_FORMATS[name].parser(), list(text)).seen == (content, reasoning, calls)


@settings(max_examples=300)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 400), max_size=12))
def test_the_pieces_do_not_show(case: tuple[str, str, str, str, list[tuple[str, str]]], cuts: list[int]) -> None:
    name, text, content, reasoning, calls = case
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert read(TOOL_FORMATS[name].parser(), pieces).seen == (content, reasoning, calls)


FRAGMENTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', "{", "}", '"', "\\", "[TOOL_CALLS]",
         "[ARGS]", "[", "]", "f(", "a=", ")", ",", ";", " ", "\n", "<|channel|>", "<|message|>", "<|end|>", "analysis",
         "x", "<think>", "</think>", "<|python_tag|>", "é", "[f("]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@settings(max_examples=400)
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.booleans(), FRAGMENTS, st.lists(st.integers(0, 120), max_size=8))
def test_whatever_a_model_writes_is_read_the_same_in_all_pieces(
    name: str, thinks: bool, text: str, cuts: list[int]
) -> None:
    def parser() -> AnswerParser:
        inner = TOOL_FORMATS[name].parser()
        return SplitReasoning(THINK, inner, is_open=False) if thinks else inner

    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert read(parser(), pieces).seen == read(parser(), [text]).seen == read(parser(), list(text)).seen


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes. ", True, "Hm.", "Yes. "),
        ("Yes </think> no.", False, "", "Yes </think> no."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>cut", False, "cut", ""),
        ("  <thi", False, "", "  <thi"),
        ("Hm. </thi", True, "Hm. </thi", ""),
        (" \n", False, "", " \n"),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_told_apart(text: str, is_open: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        found = read(SplitReasoning(THINK, PlainAnswer(), is_open=is_open), pieces)
        assert (found.reasoning, found.content) == (reasoning, content)


def test_a_prompt_may_leave_the_model_thinking() -> None:
    assert THINK.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_arguments_arrive_before_the_call_has_ended() -> None:
    parser = TOOL_FORMATS["hermes"].parser()
    found = Read()
    found.add(parser.feed('<tool_call>\n{"name": "f", "arguments": {"text": "a long'))
    assert found.calls == [("f", '{"text": "a long')]


LONG = "x" * 60_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", LONG),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{LONG}"}}}}</tool_call>'),
        ("hermes", f'<tool_call>{{"id": "{LONG}", "name": "f"}}</tool_call>'),
        ("hermes", "<tool_call>" * 5000),
        ("llama3_json", f'{{"name": "{LONG}"}}'),
        ("llama3_json", "; " * 30_000),
        ("mistral", f"[TOOL_CALLS]{LONG}"),
        ("mistral", f'[TOOL_CALLS]f[ARGS]{{"a": "{LONG}"}}'),
        ("pythonic", f"[f(a='{LONG}')]"),
        ("pythonic", f"[{LONG}"),
        ("pythonic", f"[f(a={'[' * 30_000})]"),
        ("harmony", f"<|channel|>{LONG}"),
        ("harmony", f"<|channel|>final<|message|>{LONG}"),
    ],
)
def test_the_length_of_an_answer_costs_nothing(name: str, text: str) -> None:
    """Character by character, as a slow model writes; with time that grows by the square this would take minutes."""
    assert read(TOOL_FORMATS[name].parser(), list(text)).seen == read(TOOL_FORMATS[name].parser(), [text]).seen
    read(SplitReasoning(THINK, PlainAnswer(), is_open=True), list(text))
