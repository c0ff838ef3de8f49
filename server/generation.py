"""From a checked request to a running generation, and from there to a whole answer.

Owns rendering, tokenising and admission, the end of a generation whose client has gone, and the answer that is not
streamed. Refuses to know the event stream (`streaming`) and how tokens come about (the engine).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from peagle import FinishReason, RequestInput, RequestOutput, SamplingParams, Usage
from peagle.errors import ContextLengthError
from server.engine_bundle import EngineBundle
from server.errors import GenerationFailedError, ModelNotFoundError, RequestAbortedError, ShuttingDownError
from server.lifespan import Lifecycle
from server.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatMessage,
    CompletionUsage,
    PromptTokensDetails,
)

logger = logging.getLogger(__name__)

# About a millisecond of tokenising. Beyond it a thread costs less than the pause that every stream would feel.
LONGEST_INLINE_TEXT = 4096  # characters
MESSAGE_OVERHEAD = 32  # characters that a template may put around a message, for the same estimate

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """One admitted request. To be entered with `async with`; leaving it early aborts the request in the engine."""

    request_id: str
    model: str
    created: int
    outputs: AsyncIterator[RequestOutput]
    bundle: EngineBundle
    lifecycle: Lifecycle

    async def __aenter__(self) -> AsyncIterator[RequestOutput]:
        self.lifecycle.enter(self.request_id)
        return self.outputs

    async def __aexit__(self, *_: object) -> None:
        self.lifecycle.leave(self.request_id)
        close = getattr(self.outputs, "aclose", None)  # an `AsyncIterator` need not have it
        if close is not None:
            await close()
        else:
            self.bundle.engine.abort(self.request_id)

    def check(self, output: RequestOutput) -> None:
        """Let a good output pass.

        Raises:
            HttpError: the server ended the request, or failed it.
        """
        if output.finish_reason is FinishReason.ABORT:
            raise ShuttingDownError if self.lifecycle.is_draining else RequestAbortedError
        if output.finish_reason is FinishReason.ERROR:
            raise GenerationFailedError(output.error or "no reason given")


async def start_chat(body: ChatCompletionRequest, *, served_names: tuple[str, ...], lifecycle: Lifecycle) -> Generation:
    """Render, tokenise and admit a request. Everything that can be wrong with it is raised here, before any reply.

    Raises:
        ModelNotFoundError: the model is not served here.
        RequestError: a value is out of range, or the prompt does not fit.
        EngineOverloadedError, EngineDeadError, ShuttingDownError: it can't be taken now.
    """
    if body.model not in served_names:
        raise ModelNotFoundError(
            f"The model '{body.model[:200]}' is not served here; this server has: {', '.join(served_names)}.",
            param="model",
        )
    params = sampling_params(body)
    bundle = lifecycle.admit()
    prompt_token_ids = await tokenise(bundle, body.messages)
    check_context(len(prompt_token_ids), params.max_tokens, bundle.engine.max_model_len)
    bundle = lifecycle.admit()  # tokenising may have taken a while
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    outputs = bundle.engine.generate(
        RequestInput(
            request_id=request_id, prompt_token_ids=prompt_token_ids, params=params, arrival_time=time.monotonic()
        )
    )
    return Generation(
        request_id=request_id,
        model=served_names[0],
        created=int(time.time()),
        outputs=outputs,
        bundle=bundle,
        lifecycle=lifecycle,
    )


def sampling_params(body: ChatCompletionRequest) -> SamplingParams:
    """The engine's view of a request; what is left out takes the default of `SamplingParams`."""
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,  # clients of vLLM write "all tokens" as -1
        "seed": body.seed,
        "max_tokens": body.completion_limit,
        "stop": None if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
    }
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**values)


async def tokenise(bundle: EngineBundle, messages: list[ChatMessage]) -> list[int]:
    """Prompt ids of a conversation; a long one is worked on in a thread, so that streams go on.

    Raises:
        ContextLengthError: the text is so long that it need not be tokenised to know that it does not fit.
        RequestError: the model's template refuses the conversation, or the text is not valid Unicode.
    """
    refuse_hopeless(bundle, messages)
    texts = [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in messages]

    def work() -> list[int]:
        return bundle.tokenizer.encode(bundle.chat_template.render(texts), add_special_tokens=False)

    if sum(len(text["content"]) + MESSAGE_OVERHEAD for text in texts) <= LONGEST_INLINE_TEXT:
        return work()
    async with bundle.long_prompts:
        return await asyncio.to_thread(work)


def refuse_hopeless(bundle: EngineBundle, messages: list[ChatMessage]) -> None:
    """Refuse what cannot fit whatever its tokens are: tokenising megabytes takes seconds.

    Raises:
        ContextLengthError: more messages than the context has tokens, or more text than that many tokens can spell.
    """
    limit = bundle.engine.max_model_len
    # A surrogate half counts as three bytes here, and is refused by the tokeniser.
    num_bytes = sum(len(message.text.encode(errors="surrogatepass")) for message in messages)
    least = max(len(messages), bundle.tokenizer.min_num_tokens(num_bytes))
    if least >= limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens, but the messages need at least {least} "
            f"({len(messages)} messages with {num_bytes} bytes of text). Shorten the messages.",
            param="messages",
        )


def check_context(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> None:
    """The prompt and the answer asked for must fit; without a limit, at least one token of answer must.

    Raises:
        ContextLengthError: they don't; the message holds the numbers, which clients read.
    """
    num_completion_tokens = 1 if max_tokens is None else max_tokens
    num_tokens = num_prompt_tokens + num_completion_tokens
    if num_tokens > max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, but the request needs {num_tokens}: "
            f"{num_prompt_tokens} in the messages and {num_completion_tokens} in the completion. Shorten the messages "
            "or ask for fewer tokens.",
            param="messages",
        )


async def collect(generation: Generation) -> ChatCompletion:
    """The whole answer.

    Raises:
        HttpError: the server failed the request, or ended it.
    """
    pieces: list[str] = []
    async with generation as outputs:
        async for output in outputs:
            pieces.append(output.text)
            generation.check(output)
            if output.finish_reason is not None:
                return _completion(generation, "".join(pieces), output)
    raise GenerationFailedError("the engine's outputs ended without a finish reason")


def _completion(generation: Generation, text: str, last: RequestOutput) -> ChatCompletion:
    return ChatCompletion(
        id=generation.request_id,
        created=generation.created,
        model=generation.model,
        choices=[
            ChatChoice(
                message=AssistantMessage(content=text),
                finish_reason="length" if last.finish_reason is FinishReason.LENGTH else "stop",
            )
        ],
        usage=completion_usage(last.usage),
    )


def completion_usage(usage: Usage) -> CompletionUsage:
    """Token counts in OpenAI's shape."""
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
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
