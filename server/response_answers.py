"""What a response looks like, whole and as events.

Owns OpenAI's shape of a response and of the events around its items. Refuses to know how it is sent and stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson

from peagle import FinishReason, RequestOutput
from server.answer_parts import FINGERPRINT, chat_logprobs
from server.answer_reader import AnswerReader
from server.errors import ErrorReply
from server.fan_out import ChoiceOutput
from server.generation import Generation
from server.response_items import Event, ResponseItems
from server.schemas.responses import ResponsesRequest

Finished = Callable[["ResponseAnswer"], None]


class ResponseAnswer:
    """Gathers outputs into a response.

    Args:
        body: what was asked.
        generation: that answers it.
        response_id: of the response.
        on_finished: called once it is complete, cut short or not.
    """

    def __init__(
        self, body: ResponsesRequest, generation: Generation, *, response_id: str, on_finished: Finished
    ) -> None:
        self.response_id = response_id
        self._body = body
        self._generation = generation
        self._on_finished = on_finished
        make = generation.make_parser
        self._reader = AnswerReader(
            parser=None if make is None else make(), has_several=body.parallel_tool_calls is not False
        )
        self._has_logprobs = body.top_logprobs is not None or bool(body.include)
        self.items = ResponseItems(has_logprobs=self._has_logprobs)
        self._last: RequestOutput | None = None
        self._completed_at: int | None = None

    def add(self, item: ChoiceOutput) -> None:
        """Take the next output."""
        self.take(item.output)

    def take(self, output: RequestOutput) -> list[Event]:
        """Take the next output; what is to be told of it."""
        tokenizer = self._generation.bundle.tokenizer
        logprobs = chat_logprobs(tokenizer, output.logprobs)["content"] if output.logprobs else []
        told = self.items.add(self._reader.read(output), logprobs)
        if output.is_finished:
            self._last = output
            self._completed_at = int(time.time())
            is_cut = output.finish_reason is FinishReason.LENGTH
            told += self.items.close(status="incomplete" if is_cut else "completed")
            self._on_finished(self)
        return told

    def whole(self) -> dict[str, Any]:
        """The response as it is now."""
        is_cut = self._last is not None and self._last.finish_reason is FinishReason.LENGTH
        status = "in_progress" if self._last is None else "incomplete" if is_cut else "completed"
        return self.with_status(status)

    def with_status(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response with a status of the caller's choice."""
        body = self._body
        response: dict[str, Any] = {
            "id": self.response_id,
            "object": "response",
            "created_at": self._generation.created,
            "completed_at": self._completed_at,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "model": self._generation.model,
            "output": self.items.done,
            "usage": self._usage() if status in ("completed", "incomplete") else None,
            "system_fingerprint": FINGERPRINT,
        }
        return response | self._echoed()

    def _echoed(self) -> dict[str, Any]:
        """What the request said, or what it means that it said nothing."""
        body = self._body
        plain = body.model_dump(exclude_none=True, by_alias=True, include={"text", "reasoning", "tool_choice"})
        return {
            "background": bool(body.background),
            "frequency_penalty": body.frequency_penalty or 0.0,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": body.presence_penalty or 0.0,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None} | plain.get("reasoning", {}),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} | plain.get("text", {}),
            "tool_choice": plain.get("tool_choice", "auto"),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        num_reasoning_tokens = self._reader.num_reasoning_tokens(self._generation.bundle.tokenizer)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


class ResponseEvents:
    """Writes a response as typed events; see `Chunks`.

    Args:
        answer: that is told.
    """

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer
        self._num_sent = 0

    def encode(self, item: ChoiceOutput) -> bytes:
        """The events of one output that did not fail."""
        told: list[Event] = self._begin() if self._num_sent == 0 else []
        told += self._answer.take(item.output)
        return b"".join([self._encode(event) for event in told])

    def end(self) -> bytes:
        """The last event, which has the whole response."""
        response = self._answer.whole()
        return self._encode({"type": f"response.{response['status']}", "response": response})

    def fail(self, reply: ErrorReply) -> bytes:
        """The events of a failure in mid-stream."""
        told = self._begin() if self._num_sent == 0 else []
        error = {"code": reply.code or "server_error", "message": reply.message}
        told.append({"type": "error", **error, "param": reply.param})
        told.append({"type": "response.failed", "response": self._answer.with_status("failed", error)})
        return b"".join([self._encode(event) for event in told])

    def _begin(self) -> list[Event]:
        response = self._answer.with_status("in_progress")
        return [{"type": name, "response": response} for name in ("response.created", "response.in_progress")]

    def _encode(self, event: Event) -> bytes:
        data = orjson.dumps({"type": event["type"], "sequence_number": self._num_sent, **event})
        self._num_sent += 1
        name: str = event["type"]
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
