"""The output items of a response as they grow, and the events that tell of it.

Owns the shapes of reasoning, messages and function calls, and the order of events around each: an item is added, its
parts grow, it is done. Refuses to know how events are sent, and the response around the items.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.text import AnswerEvent, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart

Event = dict[str, Any]
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass(slots=True)
class ResponseItems:
    """Items of one answer.

    Attributes:
        done: items that are complete, in order.
        has_logprobs: parts of text have them.
    """

    has_logprobs: bool = False
    done: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, Any] | None = None
    _text: list[str] = field(default_factory=list)
    _logprobs: list[Any] = field(default_factory=list)
    _waiting: list[Any] = field(default_factory=list)  # log probabilities of tokens whose text is held back

    def add(self, events: Sequence[AnswerEvent], logprobs: Sequence[Any]) -> list[Event]:
        """Take what an output adds. Log probabilities go with the next text; those of anything else are dropped."""
        told: list[Event] = []
        if not events or any(isinstance(event, ContentDelta) for event in events):
            logprobs = self._waiting = [*self._waiting, *logprobs]
        else:
            self._waiting = []
        for event in events:
            match event:
                case ContentDelta(text):
                    told += self._say("message", text, logprobs)
                    logprobs = self._waiting = []
                case ReasoningDelta(text):
                    told += self._say("reasoning", text, ())
                case ToolCallStart():
                    told += [*self.close(), *self._begin_call(event)]
                case ToolCallArguments(_, delta):
                    self._text.append(delta)
                    told.append(self._event("function_call_arguments.delta", delta=delta))
        return told

    def close(self, *, status: str = "completed") -> list[Event]:
        """The item that grows is done, if there is one.

        Args:
            status: `incomplete` if the answer was cut short in it.
        """
        item, text = self._open, "".join(self._text)
        if item is None:
            return []
        told: list[Event] = []
        if item["type"] == "function_call":
            item["arguments"] = text
            told.append(self._event("function_call_arguments.done", arguments=text, name=item["name"]))
        else:
            kind = _PARTS[item["type"]]
            self._logprobs += self._waiting if kind == "output_text" else []
            part = self._part(kind, text)
            item["content"] = [part]
            done: dict[str, Any] = {"content_index": 0, "text": text}
            if kind == "output_text":
                done["logprobs"] = list(self._logprobs)
            told.append(self._event(f"{kind}.done", **done))
            told.append(self._event("content_part.done", content_index=0, part=part))
        item["status"] = status
        told.append({"type": "response.output_item.done", "output_index": len(self.done), "item": dict(item)})
        self.done.append(item)
        self._open, self._text, self._logprobs, self._waiting = None, [], [], []
        return told

    def _say(self, kind: str, text: str, logprobs: Sequence[Any]) -> list[Event]:
        told: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            told += [*self.close(), *self._begin(kind)]
        self._text.append(text)
        self._logprobs += logprobs
        delta: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            delta["logprobs"] = list(logprobs)
        return [*told, self._event(f"{_PARTS[kind]}.delta", **delta)]

    def _begin(self, kind: str) -> list[Event]:
        if kind == "message":
            item: dict[str, Any] = {"id": new_id("msg"), "type": kind, "role": "assistant"}
        else:
            item = {"id": new_id("rs"), "type": kind, "summary": []}
        self._open = item | {"status": "in_progress", "content": []}
        part = self._part(_PARTS[kind], "")
        return [self._added(), self._event("content_part.added", content_index=0, part=part)]

    def _begin_call(self, call: ToolCallStart) -> list[Event]:
        self._open = {
            "id": new_id("fc"),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        return [self._added()]

    def _added(self) -> Event:
        assert self._open is not None
        return {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(self._open)}

    def _event(self, told: str, **fields: Any) -> Event:
        assert self._open is not None
        return {
            "type": f"response.{told}", "item_id": self._open["id"], "output_index": len(self.done), **fields
        }  # fmt: skip

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": kind, "text": text}
        if kind == "output_text":
            part["annotations"] = []
            part["logprobs"] = list(self._logprobs) if self.has_logprobs else []
        return part


def new_id(prefix: str) -> str:
    """An id that nothing else has."""
    return f"{prefix}_{uuid.uuid4().hex}"
