"""What answers to a conversation look like, whole and in chunks.

Owns OpenAI's shapes of a chat completion. The path of a chunk runs for every token of every stream on a machine that
also runs the model: it builds one dictionary and encodes it. Refuses to know how text comes about and how it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peagle import RequestOutput
from peagle.text import AnswerEvent, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from server.answer_parts import FINGERPRINT, chat_logprobs, finish_word, metrics_part, prompt_part, usage_part
from server.answer_reader import AnswerReader, Message
from server.errors import ErrorReply
from server.fan_out import ChoiceOutput
from server.generation import Generation
from server.schemas.chat import ChatCompletionRequest
from server.sse import DONE, encode_event, failure_events


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One answer as it grows."""

    reader: AnswerReader
    message: Message = field(default_factory=Message)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    last: RequestOutput | None = None


def _readers(body: ChatCompletionRequest, generation: Generation) -> list[AnswerReader]:
    """One for each choice."""
    make, has_several = generation.make_parser, body.parallel_tool_calls is not False
    return [
        AnswerReader(parser=None if make is None else make(), has_several=has_several)
        for _ in range(generation.num_choices)
    ]


class ChatAnswer:
    """Gathers outputs into a whole answer.

    Args:
        body: what was asked.
        generation: that answers it.
    """

    def __init__(self, body: ChatCompletionRequest, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._choices = [_Choice(reader=reader) for reader in _readers(body, generation)]
        self._of_prompt: list[Any] | None = None

    def add(self, item: ChoiceOutput) -> None:
        """Take the next output."""
        tokenizer = self._generation.bundle.tokenizer
        output = item.output
        if output.prompt_logprobs is not None:
            self._of_prompt = prompt_part(tokenizer, output.prompt_logprobs)
        logprobs = chat_logprobs(tokenizer, output.logprobs)["content"] if output.logprobs else []
        for index in item.choices:
            choice = self._choices[index]
            choice.message.add(choice.reader.read(output))
            choice.token_ids += output.token_ids
            choice.logprobs += logprobs
            choice.last = output

    def whole(self) -> dict[str, Any]:
        """The answer, once every choice has ended."""
        body, generation = self._body, self._generation
        answer: dict[str, Any] = {
            "id": generation.request_id,
            "object": "chat.completion",
            "created": generation.created,
            "model": generation.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage_part(
                generation.usage,
                num_reasoning_tokens=sum(
                    choice.reader.num_reasoning_tokens(generation.bundle.tokenizer) for choice in self._choices
                ),
            ),
            "system_fingerprint": FINGERPRINT,
        }
        if body.service_tier is not None:
            answer["service_tier"] = "default"
        if self._of_prompt is not None:
            answer["prompt_logprobs"] = self._of_prompt
        if body.return_token_ids:
            answer["prompt_token_ids"] = generation.prompts[0]
        last = self._choices[0].last
        if body.return_metrics and last is not None:
            answer["metrics"] = metrics_part(last)
        return answer

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        assert choice.last is not None
        assert choice.last.finish_reason is not None
        part: dict[str, Any] = {
            "index": index,
            "message": _message(choice.message, echoed=_echoed(self._body)),
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": finish_word(choice.last.finish_reason, has_calls=choice.reader.has_calls),
            "stop_reason": choice.last.stop_reason,
        }
        if self._body.return_token_ids:
            part["token_ids"] = choice.token_ids
        return part


class ChatChunks:
    """Writes outputs as chunks.

    The role chunk leaves together with the first text, so that the first chunk that a client sees is a real one: its
    arrival is the time to first token. A choice's last output becomes the rest of its text and the finish chunk; behind
    the last one comes the usage, if it was asked for (with `choices` empty; `usage` is null on all other chunks then).

    Args:
        body: what was asked.
        generation: that answers it.
    """

    def __init__(self, body: ChatCompletionRequest, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._head: dict[str, Any] = {
            "id": generation.request_id,
            "object": "chat.completion.chunk",
            "created": generation.created,
            "model": generation.model,
            "system_fingerprint": FINGERPRINT,
        }
        if body.service_tier is not None:
            self._head["service_tier"] = "default"
        self._readers = _readers(body, generation)
        self._begun: set[int] = set()
        self._shows_tokens = bool(body.logprobs or body.return_token_ids)
        self._last: RequestOutput | None = None

    def encode(self, item: ChoiceOutput) -> bytes:
        """The events of one output that did not fail; empty while its text is held back."""
        return b"".join([self._encode_for(index, item.output) for index in item.choices])

    def end(self) -> bytes:
        """What follows the last choice, the end marker included."""
        if not self._body.include_usage:
            return DONE
        tokenizer = self._generation.bundle.tokenizer
        num_reasoning_tokens = sum(reader.num_reasoning_tokens(tokenizer) for reader in self._readers)
        usage = usage_part(self._generation.usage, num_reasoning_tokens=num_reasoning_tokens)
        chunk = {**self._head, "choices": [], "usage": usage}
        if self._body.return_metrics and self._last is not None:
            chunk["metrics"] = metrics_part(self._last)
        return encode_event(chunk) + DONE

    def fail(self, reply: ErrorReply) -> bytes:
        """The error, and the end marker."""
        return failure_events(reply)

    def _encode_for(self, index: int, output: RequestOutput) -> bytes:
        events = b""
        reader = self._readers[index]
        deltas = [_delta(event) for event in reader.read(output)]
        if not deltas and self._shows_tokens and output.token_ids:
            deltas = [{"content": ""}]
        if index not in self._begun and (deltas or output.is_finished):
            self._begun.add(index)
            events = self._begin(index, output)
        shown: RequestOutput | None = output  # the first chunk of an output has its tokens
        for delta in deltas:
            events += self._chunk(index, delta, shown)
            shown = None
        if output.finish_reason is not None:
            self._last = output
            word = finish_word(output.finish_reason, has_calls=reader.has_calls)
            events += self._chunk(index, {}, None, word, output.stop_reason)
        return events

    def _begin(self, index: int, output: RequestOutput) -> bytes:
        """The role, what is echoed, and what is told of the prompt once."""
        extra: dict[str, Any] = {}
        if index == 0 and output.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_part(self._generation.bundle.tokenizer, output.prompt_logprobs)
        if index == 0 and self._body.return_token_ids:
            extra["prompt_token_ids"] = self._generation.prompts[0]
        delta = {"role": "assistant", "content": _echoed(self._body), "refusal": None}
        return self._chunk(index, delta, None, extra=extra)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        output: RequestOutput | None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        *,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        if output is not None and self._shows_tokens:
            if self._body.logprobs:
                choice["logprobs"] = chat_logprobs(self._generation.bundle.tokenizer, output.logprobs or ())
            if self._body.return_token_ids:
                choice["token_ids"] = list(output.token_ids)
        chunk = {**self._head, "choices": [choice]}
        if self._body.continuous_usage:
            chunk["usage"] = usage_part(self._generation.usage)
        elif self._body.include_usage:
            chunk["usage"] = None
        if extra:
            chunk |= extra
        return encode_event(chunk)


def _message(message: Message, *, echoed: str) -> dict[str, Any]:
    """A whole message. Content is null if there is none beside calls."""
    content: str | None = echoed + "".join(message.content)
    part: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if message.reasoning:
        part["reasoning_content"] = part["reasoning"] = "".join(message.reasoning)
    if message.calls:
        part["content"] = content or None
        part["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(arguments)},
            }
            for call, arguments in zip(message.calls, message.arguments, strict=True)
        ]
    return part


def _delta(event: AnswerEvent) -> dict[str, Any]:
    """What a chunk says of one event. Reasoning has two names: SGLang's and llama.cpp's, and vLLM's."""
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, delta):
            return {"tool_calls": [{"index": index, "function": {"arguments": delta}}]}


def _echoed(body: ChatCompletionRequest) -> str:
    return body.messages[-1].text if body.echo else ""
