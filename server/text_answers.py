"""What continuations of a text look like, whole and in chunks.

Owns OpenAI's shapes of a text completion, with vLLM's additions. Refuses to know how text comes about and how it is
sent.
"""

from __future__ import annotations

from typing import Any

from peagle import RequestOutput
from server.answer_parts import FINGERPRINT, TextLogprobs, finish_word, metrics_part, prompt_part, usage_part
from server.errors import ErrorReply
from server.fan_out import ChoiceOutput
from server.generation import Generation
from server.schemas.completions import CompletionRequest
from server.sse import DONE, encode_event, failure_events


class _Choices:
    """The choices of one output: what whole answers and chunks have in common."""

    def __init__(self, body: CompletionRequest, generation: Generation) -> None:
        self.body = body
        self.generation = generation
        self.head: dict[str, Any] = {
            "id": generation.request_id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
            "system_fingerprint": FINGERPRINT,
        }
        self._logprobs = [TextLogprobs(generation.bundle.tokenizer) for _ in range(self.num_choices)]
        self._of_prompts: dict[int, Any] = {}  # by prompt: the engine tells the first answer's request alone
        self._begun: set[int] = set()

    @property
    def num_choices(self) -> int:
        """Over all prompts."""
        return len(self.generation.prompts) * self.generation.num_choices

    def parts(self, item: ChoiceOutput) -> list[dict[str, Any]]:
        """What the output adds to each choice that it belongs to."""
        if item.output.prompt_logprobs is not None:
            self._of_prompts[item.prompt_index] = item.output.prompt_logprobs
        return [self._part(index, item) for index in item.choices]

    def _part(self, index: int, item: ChoiceOutput) -> dict[str, Any]:
        body, output = self.body, item.output
        is_first = index not in self._begun
        self._begun.add(index)
        prompt = self.generation.prompts[item.prompt_index]
        is_silent = body.completion_limit == 0  # one token was sampled, only to read the prompt
        token_ids = [] if is_silent else list(output.token_ids)
        logprobs = [] if is_silent else list(output.logprobs or ())
        text = "" if is_silent else output.text
        part: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        of_prompt = self._of_prompts.get(item.prompt_index)
        if is_first and body.echo:
            part["text"] = self._spelled(item.prompt_index) + text
        if body.logprobs is not None:
            echoed = list(of_prompt or ()) if is_first and body.echo else []
            echoed_ids = prompt if echoed else []
            part["logprobs"] = self._logprobs[index].part([*echoed_ids, *token_ids], [*echoed, *logprobs])
        if is_first and body.prompt_logprobs is not None and of_prompt is not None:
            part["prompt_logprobs"] = prompt_part(self.generation.bundle.tokenizer, of_prompt)
        if body.return_token_ids:
            part["token_ids"] = token_ids
            if is_first:
                part["prompt_token_ids"] = prompt
        part["finish_reason"] = None
        if output.finish_reason is not None:
            part["finish_reason"] = "length" if is_silent else finish_word(output.finish_reason)
            part["stop_reason"] = None if is_silent else output.stop_reason
        return part

    def usage(self) -> dict[str, Any]:
        """Of all choices so far."""
        part = usage_part(self.generation.usage)
        if self.body.completion_limit == 0:
            part |= {"completion_tokens": 0, "total_tokens": part["prompt_tokens"]}
        return part

    def _spelled(self, prompt_index: int) -> str:
        prompt = self.body.prompts[prompt_index]
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return prompt
        token_ids = self.generation.prompts[prompt_index]
        return self.generation.bundle.tokenizer.decode(token_ids, skip_special_tokens=False)


class TextAnswer:
    """Gathers outputs into a whole answer.

    Args:
        body: what was asked.
        generation: that answers it.
    """

    def __init__(self, body: CompletionRequest, generation: Generation) -> None:
        self._choices = _Choices(body, generation)
        self._grown: list[dict[str, Any] | None] = [None] * self._choices.num_choices
        self._last: RequestOutput | None = None

    def add(self, item: ChoiceOutput) -> None:
        """Take the next output."""
        for part in self._choices.parts(item):
            index = part["index"]
            grown = self._grown[index]
            self._grown[index] = part if grown is None else _joined(grown, part)
        if item.output.is_finished:
            self._last = item.output

    def whole(self) -> dict[str, Any]:
        """The answer, once every choice has ended."""
        body = self._choices.body
        answer = {**self._choices.head, "choices": self._grown, "usage": self._choices.usage()}
        if body.return_metrics and self._last is not None:
            answer["metrics"] = metrics_part(self._last)
        return answer


class TextChunks:
    """Writes outputs as chunks; behind the last one comes the usage, if it was asked for.

    Args:
        body: what was asked.
        generation: that answers it.
    """

    def __init__(self, body: CompletionRequest, generation: Generation) -> None:
        self._body = body
        self._choices = _Choices(body, generation)
        self._shows_tokens = body.logprobs is not None or bool(body.return_token_ids)
        self._begun: set[int] = set()
        self._last: RequestOutput | None = None

    def encode(self, item: ChoiceOutput) -> bytes:
        """The events of one output that did not fail; empty while its text is held back."""
        output = item.output
        says_something = output.text or output.is_finished or (self._shows_tokens and output.token_ids)
        if not says_something and output.prompt_logprobs is None:
            return b""
        if output.is_finished:
            self._last = output
        return b"".join([self._chunk(part) for part in self._choices.parts(item)])

    def end(self) -> bytes:
        """What follows the last choice, the end marker included."""
        if not self._body.include_usage:
            return DONE
        chunk = {**self._choices.head, "choices": [], "usage": self._choices.usage()}
        if self._body.return_metrics and self._last is not None:
            chunk["metrics"] = metrics_part(self._last)
        return encode_event(chunk) + DONE

    def fail(self, reply: ErrorReply) -> bytes:
        """The error, and the end marker."""
        return failure_events(reply)

    def _chunk(self, part: dict[str, Any]) -> bytes:
        chunk = {**self._choices.head, "choices": [part]}
        if self._body.continuous_usage:
            chunk["usage"] = self._choices.usage()
        elif self._body.include_usage:
            chunk["usage"] = None
        return encode_event(chunk)


def _joined(grown: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A choice that is longer by a part."""
    joined = {**grown, **part, "text": grown["text"] + part["text"]}
    if part["logprobs"] is not None:
        joined["logprobs"] = {name: grown["logprobs"][name] + part["logprobs"][name] for name in part["logprobs"]}
    if "token_ids" in part:
        joined["token_ids"] = grown["token_ids"] + part["token_ids"]
    return joined
