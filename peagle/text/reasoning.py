"""What a model thinks before it answers, told apart from the answer.

Owns the families of marks around reasoning, and the parser that splits an answer at them. What a prompt ends with says
whether the model is already thinking when its answer begins: some chat templates open the mark themselves. Refuses to
know what is in the answer (a parser of its own reads it) and tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peagle.text.answer_events import AnswerEvent, AnswerParser, ReasoningDelta
from peagle.text.held_text import find_marker


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarks:
    """What a family of models writes around its reasoning."""

    name: str
    begin: str
    end: str

    def is_open_after(self, prompt_text: str) -> bool:
        """True if a prompt leaves the model in the middle of its reasoning."""
        return prompt_text.rstrip().endswith(self.begin)


THINK = ReasoningMarks(name="think", begin="<think>", end="</think>")
MISTRAL_THINK = ReasoningMarks(name="mistral", begin="[THINK]", end="[/THINK]")
REASONING_MARKS: Mapping[str, ReasoningMarks] = {marks.name: marks for marks in (THINK, MISTRAL_THINK)}


class SplitReasoning:
    """See `AnswerParser`. Reasoning comes first or not at all; white space around it belongs to nobody.

    Args:
        marks: of the model's family.
        answer: reads what is not reasoning.
        is_open: the answer begins in the middle of reasoning.
    """

    def __init__(self, marks: ReasoningMarks, answer: AnswerParser, *, is_open: bool) -> None:
        self._marks = marks
        self._answer = answer
        self._is_thinking = is_open
        self._is_decided = is_open  # whether there is reasoning
        self._has_begun = False  # something other than white space was thought or said
        self._held = ""

    def feed(self, text_delta: str) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        self._held += text_delta
        events: list[AnswerEvent] = []
        if not self._is_decided:
            self._decide()
        if self._is_decided and self._is_thinking:
            events += self._think()
        if self._is_decided and not self._is_thinking:
            events += self._say()
        return events

    def finish(self) -> list[AnswerEvent]:
        """See `AnswerParser`."""
        held, self._held = self._held, ""
        if self._is_thinking and self._is_decided:
            held = held.rstrip()
            return [*([ReasoningDelta(held)] if held else []), *self._answer.finish()]
        # Nothing but white space and the beginning of a mark, which is text after all.
        return [*(self._answer.feed(held) if held and not self._is_decided else []), *self._answer.finish()]

    def _decide(self) -> None:
        stripped = self._held.lstrip()
        if stripped.startswith(self._marks.begin):
            self._is_decided = self._is_thinking = True
            self._held = stripped[len(self._marks.begin) :]
        elif not self._marks.begin.startswith(stripped):
            self._is_decided, self._has_begun = True, True

    def _think(self) -> list[AnswerEvent]:
        found = find_marker(self._held, (self._marks.end,))
        if found.marker is not None:
            self._is_thinking, self._held = False, found.rest
            text = found.before.rstrip()
        else:
            text = found.before.rstrip()  # white space waits: the end mark may follow it
            self._held = self._held[len(text) :]
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        if found.marker is not None:
            self._has_begun = False
        return [ReasoningDelta(text)] if text else []

    def _say(self) -> list[AnswerEvent]:
        text, self._held = self._held, ""
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        return self._answer.feed(text) if text else []
