"""From a checked request to a running generation.

Owns admission, the end of a generation whose client has gone, and the sum of what it used. Refuses to know what answers
look like (`chat_answers`, `text_answers`), the event stream (`streaming`) and how tokens come about (the engine).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from peagle import FinishReason, RequestInput, RequestOutput, SamplingParams, Usage
from peagle.errors import InvalidParameterError
from peagle.text import AnswerParser
from server.admission import admit, check_admission
from server.answer_rules import hold_answer
from server.engine_bundle import EngineBundle
from server.errors import GenerationFailedError, ModelNotFoundError, RequestAbortedError, ShuttingDownError
from server.fan_out import ChoiceOutput, FanOut, Member, Single, members_of
from server.lifespan import Lifecycle
from server.prompts import chat_prompt, check_context, completion_prompts, encode
from server.request_params import chat_params, completion_params
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.messages import joined
from server.schemas.sampling_fields import SamplingFields

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """One admitted request. To be entered with `async with`; leaving it early aborts it in the engine."""

    request_id: str
    model: str
    created: int
    prompts: list[list[int]]
    num_choices: int  # to each prompt
    members: list[Member]
    outputs: FanOut | Single
    bundle: EngineBundle
    lifecycle: Lifecycle
    make_parser: Callable[[], AnswerParser] | None = None  # of each answer; None if they are text and nothing else
    _latest: dict[int, RequestOutput] = field(default_factory=dict)  # by choice

    async def __aenter__(self) -> AsyncIterator[ChoiceOutput]:
        for member in self.members:
            self.lifecycle.enter(member.request.request_id)
        return self._checked()

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            self.lifecycle.leave(member.request.request_id)
        await self.outputs.aclose()

    @property
    def usage(self) -> Usage:
        """Of all answers so far. A prompt counts once, whatever is made of it, and so does what the cache had of it."""
        latest = self._latest
        firsts = [latest[index].usage for index in latest if index % self.num_choices == 0]
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self.prompts),
            completion_tokens=sum(output.usage.completion_tokens for output in latest.values()),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
            accepted_prediction_tokens=sum(output.usage.accepted_prediction_tokens for output in latest.values()),
            rejected_prediction_tokens=sum(output.usage.rejected_prediction_tokens for output in latest.values()),
        )

    async def _checked(self) -> AsyncIterator[ChoiceOutput]:
        num_left = len(self.prompts) * self.num_choices
        async for item in self.outputs:
            self._check(item.output)
            for choice in item.choices:
                self._latest[choice] = item.output
            num_left -= len(item.choices) * item.output.is_finished
            yield item
            if num_left == 0:
                return
        raise GenerationFailedError("the engine's outputs ended without a finish reason")

    def _check(self, output: RequestOutput) -> None:
        """Let a good output pass."""
        if output.finish_reason is FinishReason.ABORT:
            raise ShuttingDownError if self.lifecycle.is_draining else RequestAbortedError
        if output.finish_reason is FinishReason.ERROR:
            raise GenerationFailedError(output.error or "no reason given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What admission asks of the server.

    Attributes:
        served_names: that the model can be called by; the first is used in answers.
        lifecycle: the process's state.
        has_priorities: the scheduler looks at priorities.
        trusts_templates: requests may bring a chat template.
    """

    served_names: tuple[str, ...]
    lifecycle: Lifecycle
    has_priorities: bool = False
    trusts_templates: bool = False

    async def start_chat(self, body: ChatCompletionRequest, *, prefix: str = "chatcmpl") -> Generation:
        """Render, tokenise and admit. Everything that can be wrong with a request is raised here, before any reply.

        Args:
            body: what is asked.
            prefix: of the id.

        Raises:
            ModelNotFoundError: the model is not served here.
            RequestError: a value is out of range, or the prompt does not fit.
            EngineOverloadedError, EngineDeadError, ShuttingDownError: it can't be taken now.
            RateLimitError, QueueTimeoutError: nor can it, for reasons of its client or of time.
        """
        bundle = self._look_at(body)
        if body.chat_template is not None and not self.trusts_templates:
            raise InvalidParameterError(
                "'chat_template' is not supported: the model's own template is used, and 'chat_template_kwargs' "
                "reaches its variables; a server with --trust-request-chat-template takes others.",
                param="chat_template",
                code="unsupported_parameter",
            )
        params = chat_params(body, bundle.tokenizer)
        prompt = await chat_prompt(bundle, body)
        check_context(len(prompt.token_ids), params.max_tokens, bundle.engine.max_model_len, param="messages")
        params = hold_answer(params, body, answers=bundle.answers, tokenizer=bundle.tokenizer, prompt_end=prompt.end)
        await self._prepare(bundle, params)
        predicted: list[int] = []
        if body.prediction is not None:
            predicted = await encode(bundle, joined(body.prediction.content), add_special_tokens=False)
        generation = await self._admit(body, [prompt.token_ids], params, prefix=prefix, predicted=predicted)
        has_tools = body.tool_mode != "none"
        if has_tools or bundle.answers.has_reasoning:
            generation.make_parser = partial(bundle.answers.parser, prompt_end=prompt.end, has_tools=has_tools)
        return generation

    async def start_completion(self, body: CompletionRequest) -> Generation:
        """As `start_chat`."""
        bundle = self._look_at(body)
        params = completion_params(body, bundle.tokenizer)
        await self._prepare(bundle, params)
        prompts = await completion_prompts(bundle, body)
        for prompt in prompts:
            check_context(len(prompt), params.max_tokens, bundle.engine.max_model_len, param="prompt")
        return await self._admit(body, prompts, params, prefix="cmpl")

    def check_model(self, name: str) -> None:
        """Refuse a name that nothing here is called by."""
        if name not in self.served_names:
            raise ModelNotFoundError(
                f"The model '{name[:200]}' is not served here; this server has: {', '.join(self.served_names)}.",
                param="model",
            )

    def _look_at(self, body: SamplingFields) -> EngineBundle:
        self.check_model(body.model)
        if body.priority and not self.has_priorities:
            raise InvalidParameterError(
                "'priority' has no effect here: the server must be started with --scheduling-policy priority",
                param="priority",
            )
        if body.return_metrics and body.num_choices > 1:
            raise InvalidParameterError("'return_metrics' goes with one answer only", param="return_metrics")
        bundle = self.lifecycle.admit()
        check_admission()
        return bundle

    async def _prepare(self, bundle: EngineBundle, params: SamplingParams) -> None:
        """Compile a grammar in a thread: most take a millisecond, the largest half a second."""
        if params.grammar is not None:
            await asyncio.to_thread(bundle.engine.prepare, params)

    async def _admit(
        self,
        body: SamplingFields,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        prefix: str,
        predicted: list[int] | None = None,
    ) -> Generation:
        self.lifecycle.admit()  # tokenising may have taken a while
        arrival_time = await admit(sum(len(prompt) for prompt in prompts))
        bundle = self.lifecycle.require_engine()  # a drain lets those in who wait for their turn
        request_id = f"{prefix}-{body.request_id or uuid.uuid4().hex}"
        groups: list[list[Member]] = []
        for index, prompt in enumerate(prompts):
            request = RequestInput(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-p{index}",
                prompt_token_ids=prompt,
                params=params,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                arrival_time=arrival_time,
                predicted_token_ids=tuple(predicted or ()),
            )
            groups.append(members_of(request, prompt_index=index, num_choices=body.num_choices))
        members = [member for group in groups for member in group]
        outputs = Single(bundle.engine, members[0]) if len(members) == 1 else FanOut(bundle.engine, groups)
        return Generation(
            request_id=request_id,
            model=self.served_names[0],
            created=int(time.time()),
            prompts=prompts,
            num_choices=body.num_choices,
            members=members,
            outputs=outputs,
            bundle=bundle,
            lifecycle=self.lifecycle,
        )


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client goes away. The body must have been read.

    Raises:
        ClientDisconnect: the client went away first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
