"""From a request for a response to the chat that answers it.

Owns the translation of items, fields and the names of fields in errors. Refuses to know how chats are answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from peagle.errors import InvalidParameterError
from server.errors import describe
from server.schemas.chat import ChatCompletionRequest
from server.schemas.responses import LOGPROBS, FunctionTool, InputItem, ResponsesRequest, TextFormat, words_of

Message = dict[str, Any]
_SAME_NAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop", "ignore_eos", "parallel_tool_calls", "chat_template_kwargs", "priority",
    "cache_salt", "service_tier", "user", "stream",
)  # fmt: skip
_FIELDS = {  # of a chat, by what clients of this path call them
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


def input_messages(body: ResponsesRequest) -> list[Message]:
    """The items of a request as messages of a chat."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return messages_of(body.input)


def messages_of(items: Sequence[InputItem]) -> list[Message]:
    """Items as messages. What the assistant thought, said and called in a row is one message of its own."""
    messages: list[Message] = []
    reasoning: str | None = None
    for item in items:
        if item.kind == "reasoning":
            reasoning = words_of(item.content) or words_of(item.summary) or None
            continue
        if item.kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant" or reasoning is not None:
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
        elif item.kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": words_of(item.output)})
        else:
            messages.append({"role": item.role, "content": words_of(item.content)})
        if reasoning is not None and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = None
    return messages


def to_chat(body: ResponsesRequest, conversation: Sequence[Message]) -> ChatCompletionRequest:
    """The chat that answers a request.

    Args:
        body: the request.
        conversation: all messages, those of earlier responses included.

    Raises:
        InvalidParameterError: the conversation is none that a chat may have.
    """
    messages = list(conversation)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    fields["messages"] = messages
    fields["max_completion_tokens"] = body.max_output_tokens
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text is not None:
        fields["verbosity"] = body.text.verbosity
        fields["response_format"] = None if body.text.format is None else _format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
        fields["tool_choice"] = _choice(body)
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    try:
        return ChatCompletionRequest.model_validate({key: value for key, value in fields.items() if value is not None})
    except ValidationError as error:
        reply = describe(error)
        raise InvalidParameterError(
            reply.message.replace("'messages", "'input"),
            param=None if reply.param is None else field_name(reply.param),
            code=reply.code,
        ) from error


def field_name(param: str) -> str:
    """What a client of this path calls a field of a chat."""
    head, dot, rest = param.partition(".")
    if head.startswith("messages["):  # several items may be one message, and one message may be an earlier one
        return "input"
    return _FIELDS.get(head, head) + (f"{dot}{rest}" if head in ("tools", "tool_choice") else "")


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = {
        "name": wanted.name, "description": wanted.description, "schema": wanted.schema_, "strict": wanted.strict,
    }  # fmt: skip
    return {"type": "json_schema", "json_schema": {key: value for key, value in schema.items() if value is not None}}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "function":
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools or ()]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": tools}}
