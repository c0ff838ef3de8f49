"""From what a client sends to prompt tokens.

Owns rendering, tokenising (a long text in a thread, so that streams go on), and what of it fits. Refuses to know what
is sampled afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from peagle.errors import ContextLengthError, InvalidParameterError
from server.engine_bundle import EngineBundle
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.messages import ChatMessage
from server.schemas.sampling_fields import SamplingFields
from server.schemas.tokenize import TokenizeRequest

# About a millisecond of tokenising. Beyond it a thread costs less than the pause that every stream would feel.
LONGEST_INLINE_TEXT = 4096  # characters
MESSAGE_OVERHEAD = 32  # characters that a template may put around a message, for the same estimate


async def chat_prompt(bundle: EngineBundle, body: ChatCompletionRequest) -> list[int]:
    """Prompt ids of a conversation, truncated as asked.

    Raises:
        ContextLengthError: the text is so long that it need not be tokenised to know that it does not fit.
        RequestError: the model's template refuses the conversation, or the text is not valid Unicode.
    """
    if body.truncate_prompt_tokens is None:
        refuse_hopeless(bundle, [message.text for message in body.messages], param="messages")
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.verbosity is not None:
        variables["verbosity"] = body.verbosity
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    token_ids = await render_and_encode(
        bundle,
        body.messages,
        variables=variables,
        begins_message=body.begins_message,
        continues=bool(body.continue_final_message),
    )
    return truncated(token_ids, body, body.completion_limit, bundle.engine.max_model_len)


async def tokenize_prompt(bundle: EngineBundle, body: TokenizeRequest) -> list[int]:
    """Token ids of a text or of a conversation.

    Raises:
        RequestError: as `chat_prompt`.
    """
    if body.messages is None:
        assert body.prompt is not None, "the schema wants one of both"
        return await encode(bundle, body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return await render_and_encode(
        bundle,
        body.messages,
        variables=dict(body.chat_template_kwargs or {}),
        begins_message=body.begins_message,
        continues=bool(body.continue_final_message),
    )


async def completion_prompts(bundle: EngineBundle, body: CompletionRequest) -> list[list[int]]:
    """Ids of each prompt, truncated as asked.

    Raises:
        ContextLengthError: as `chat_prompt`.
        InvalidParameterError: a prompt is empty.
    """
    found: list[list[int]] = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            if body.truncate_prompt_tokens is None:
                refuse_hopeless(bundle, [prompt], param="prompt")
            token_ids = await encode(bundle, prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            token_ids = list(prompt)
            _check_ids(token_ids, bundle.tokenizer.vocab_size)
        if not token_ids:
            raise InvalidParameterError("the prompt is empty: it must have at least one token", param="prompt")
        found.append(truncated(token_ids, body, max(body.completion_limit, 1), bundle.engine.max_model_len))
    return found


async def render_and_encode(
    bundle: EngineBundle,
    messages: list[ChatMessage],
    *,
    variables: dict[str, Any],
    begins_message: bool,
    continues: bool,
) -> list[int]:
    """Prompt ids of a conversation.

    Args:
        bundle: the model's text side.
        messages: the conversation.
        variables: further ones of the chat template.
        begins_message: end with the beginning of an assistant's message.
        continues: end in the middle of the last message instead.
    """
    plain = [_plain(message) for message in messages]

    def render() -> str:
        if continues:
            return bundle.chat_template.render_unfinished(plain, variables=variables)
        return bundle.chat_template.render(plain, add_generation_prompt=begins_message, variables=variables)

    length = sum(len(message.text) + MESSAGE_OVERHEAD for message in messages)
    return await _off_the_loop(bundle, length, lambda: bundle.tokenizer.encode(render(), add_special_tokens=False))


async def encode(bundle: EngineBundle, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text."""
    return await _off_the_loop(
        bundle, len(text), lambda: bundle.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    )


def refuse_hopeless(bundle: EngineBundle, texts: list[str], *, param: str) -> None:
    """Refuse what cannot fit whatever its tokens are: tokenising megabytes takes seconds.

    Raises:
        ContextLengthError: more texts than the context has tokens, or more of it than that many tokens can spell.
    """
    limit = bundle.engine.max_model_len
    # A surrogate half counts as three bytes here, and is refused by the tokeniser.
    num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    least = max(len(texts), bundle.tokenizer.min_num_tokens(num_bytes))
    if least >= limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens, but the {param} needs at least {least} "
            f"({num_bytes} bytes of text). Shorten it."
            if param == "prompt"
            else f"This model's maximum context length is {limit} tokens, but the messages need at least {least} "
            f"({len(texts)} messages with {num_bytes} bytes of text). Shorten the messages.",
            param=param,
        )


def check_context(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, param: str) -> None:
    """The prompt and the answer asked for must fit; without a limit, at least one token of answer must.

    Raises:
        ContextLengthError: they don't; the message holds the numbers, which clients read.
    """
    num_completion_tokens = 1 if max_tokens is None else max_tokens
    num_tokens = num_prompt_tokens + num_completion_tokens
    if num_tokens > max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, but the request needs {num_tokens}: "
            f"{num_prompt_tokens} in the {param} and {num_completion_tokens} in the completion. Shorten the {param} "
            "or ask for fewer tokens.",
            param=param,
        )


def truncated(token_ids: list[int], body: SamplingFields, max_tokens: int | None, max_model_len: int) -> list[int]:
    """The end of a prompt that is to be kept: what is asked for, or with -1 what leaves room for the answer."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return token_ids
    if wanted == -1:
        wanted = max(1, max_model_len - (max_tokens or 1))
    return token_ids[-wanted:]


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    largest = max(token_ids)
    if largest >= vocab_size:
        raise InvalidParameterError(
            f"token id {largest} is not in the vocabulary, which ends at {vocab_size - 1}", param="prompt"
        )


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates expect it. They know no developer."""
    calls = [call.model_dump(exclude_none=True) for call in message.tool_calls or ()]
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }


async def _off_the_loop(bundle: EngineBundle, length: int, work: Callable[[], list[int]]) -> list[int]:
    if length <= LONGEST_INLINE_TEXT:
        return work()
    async with bundle.long_prompts:
        return await asyncio.to_thread(work)
