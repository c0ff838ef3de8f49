"""From what a client sends to prompt tokens.

Owns rendering, tokenising (a long text in a thread, so that streams go on), and what of it fits. Refuses to know what
is sampled afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from peagle.errors import ContextLengthError, InvalidParameterError
from peagle.text import with_tools_in_text
from server.engine_bundle import EngineBundle
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.messages import ChatMessage
from server.schemas.sampling_fields import SamplingFields
from server.schemas.tokenize import TokenizeRequest
from server.schemas.tools import Tool

# About a millisecond of tokenising. Beyond it a thread costs less than the pause that every stream would feel.
LONGEST_INLINE_TEXT = 4096  # characters
_PROMPT_END_LENGTH = 64  # characters; enough for a mark and the white space behind it
T = TypeVar("T")
MESSAGE_OVERHEAD = 32  # characters that a template may put around a message, for the same estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation as the model gets it.

    Attributes:
        token_ids: truncated as asked.
        end: the last characters of the text.
    """

    token_ids: list[int]
    end: str


async def chat_prompt(bundle: EngineBundle, body: ChatCompletionRequest) -> ChatPrompt:
    """Prompt of a conversation.

    Raises:
        ContextLengthError: the text is so long that it need not be tokenised to know that it does not fit.
        RequestError: the model's template refuses the conversation, or the text is not valid Unicode.
    """
    if body.truncate_prompt_tokens is None:
        texts = [message.text for message in body.messages]
        texts += [tool.function.model_dump_json(exclude_none=True) for tool in body.offered_tools]
        refuse_hopeless(bundle, texts, param="messages")
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.verbosity is not None:
        variables["verbosity"] = body.verbosity
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    if body.chat_template is not None:
        bundle = replace(bundle, chat_template=bundle.chat_template.replaced_by(body.chat_template))
    prompt = await render_and_encode(
        bundle,
        body.messages,
        tools=body.offered_tools,
        variables=variables,
        begins_message=body.begins_message,
        continues=bool(body.continue_final_message),
    )
    return replace(
        prompt,
        token_ids=truncated(prompt.token_ids, body, body.completion_limit, bundle.engine.max_model_len),
    )


async def tokenize_prompt(bundle: EngineBundle, body: TokenizeRequest) -> list[int]:
    """Token ids of a text or of a conversation.

    Raises:
        RequestError: as `chat_prompt`.
    """
    if body.messages is None:
        assert body.prompt is not None, "the schema wants one of both"
        return await encode(bundle, body.prompt, add_special_tokens=body.add_special_tokens is not False)
    prompt = await render_and_encode(
        bundle,
        body.messages,
        tools=body.tools or [],
        variables=dict(body.chat_template_kwargs or {}),
        begins_message=body.begins_message,
        continues=bool(body.continue_final_message),
    )
    return prompt.token_ids


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
    tools: list[Tool],
    variables: dict[str, Any],
    begins_message: bool,
    continues: bool,
) -> ChatPrompt:
    """Prompt of a conversation, whole.

    Args:
        bundle: the model's text side.
        messages: the conversation.
        tools: that the model is told of; where its template does not speak of tools, the system message does.
        variables: further ones of the chat template.
        begins_message: end with the beginning of an assistant's message.
        continues: end in the middle of the last message instead.
    """
    template = bundle.chat_template
    plain: Sequence[Mapping[str, Any]] = [_plain(message) for message in messages]
    described = [_described(tool) for tool in tools]
    if not template.knows_tools:
        plain, described = with_tools_in_text(plain, described), []

    def render() -> ChatPrompt:
        if continues:
            text = template.render_unfinished(plain, tools=described or None, variables=variables)
        else:
            text = template.render(
                plain, add_generation_prompt=begins_message, tools=described or None, variables=variables
            )
        return ChatPrompt(
            token_ids=bundle.tokenizer.encode(text, add_special_tokens=False), end=text[-_PROMPT_END_LENGTH:]
        )

    length = sum(len(message.text) + MESSAGE_OVERHEAD for message in messages)
    length += sum(len(str(tool)) for tool in described)
    return await _off_the_loop(bundle, length, render)


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
    """A message as chat templates expect it. They know no developer, and want the arguments of calls as objects."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.value}}
        for call in message.tool_calls or ()
    ]
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }


def _described(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates expect it: what is said to the server about it is left out."""
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}


async def _off_the_loop(bundle: EngineBundle, length: int, work: Callable[[], T]) -> T:
    if length <= LONGEST_INLINE_TEXT:
        return work()
    async with bundle.long_prompts:
        return await asyncio.to_thread(work)
