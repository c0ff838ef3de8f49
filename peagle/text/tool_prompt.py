"""Tools for models whose chat template does not speak of them.

Owns what such a model is told: the functions in the system message, its earlier calls and their results as text, in
the format of `hermes`. Refuses to know templates that do it themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.text.tool_parsers.hermes import BEGIN, END

_EXPLANATION = """\
You can call functions. Here they are, as JSON, one a line:
<tools>
{tools}
</tools>
To call one, write an object with its name and its arguments between two marks, and nothing else:
{begin}
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
{end}"""


def with_tools_in_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The same conversation, for a template that knows no tools.

    Args:
        messages: the conversation; may have calls and messages of role `tool`.
        tools: what may be called, in OpenAI's shape.
    """
    found = [_in_text(message) for message in messages]
    if not tools:
        return found
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    explanation = _EXPLANATION.format(tools=lines, begin=BEGIN, end=END)
    if found and found[0].get("role") == "system":
        first = dict(found[0])
        first["content"] = f"{first.get('content') or ''}\n\n{explanation}".lstrip()
        return [first, *found[1:]]
    return [{"role": "system", "content": explanation}, *found]


def _in_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{BEGIN}\n{_call(call['function'])}\n{END}" for call in calls]
    content = "\n".join([*([message["content"]] if message.get("content") else []), *written])
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {text}}}'
