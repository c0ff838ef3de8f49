"""The chat template of a checkpoint: messages in, prompt text out.

Owns the Jinja environment, made to agree with `transformers`' `apply_chat_template` (which the tests compare with),
and the translation of whatever a template raises into a request error. Refuses to know tokens and roles: what a
message may hold is the template's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from peagle.errors import InvalidParameterError, ModelLoadError, RequestError

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders a conversation to the text that the model was trained to continue.

    Immutable after construction and safe to share between threads.

    Args:
        source: Jinja source, or None for a checkpoint without a template (rendering then fails, completions work).
        bos_token, eos_token, other_tokens: special tokens by name, as templates refer to them. A token that the
            checkpoint does not have is left undefined, so it renders as nothing.

    Attributes:
        source: as given.
        knows_tools: the template does something with `tools`.

    Raises:
        ModelLoadError: the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        other_tokens: Mapping[str, str] | None = None,
    ) -> None:
        named_tokens = {**(other_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in named_tokens.items() if token is not None}
        self.source = source
        self._template = None if source is None else _compile(source)
        self.knows_tools = source is not None and _mentions(source, "tools")

    def replaced_by(self, source: str) -> ChatTemplate:
        """A client's template, with the model's special tokens.

        Raises:
            InvalidParameterError: it is not valid Jinja.
        """
        try:
            return ChatTemplate(source, other_tokens=self._tokens)
        except ModelLoadError as error:
            raise InvalidParameterError(
                f"chat_template is not valid Jinja: {error.__cause__}", param="chat_template"
            ) from error

    @property
    def is_present(self) -> bool:
        """True if the checkpoint has a template."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text of a conversation. Special tokens are in the text: encode it without adding any.

        Keys whose value is None are dropped first, for templates ask whether a key is there.

        Args:
            messages: the conversation.
            add_generation_prompt: end with the beginning of a message of the assistant's.
            tools: JSON descriptions of what the model may call.
            variables: further ones of the template; those that it always has cannot be set.

        Raises:
            RequestError: the checkpoint has no chat template.
            InvalidParameterError: there are no messages, a variable is one of the template's own, or the template
                refused or could not handle what it got.
        """
        if self._template is None:
            raise RequestError(
                "the model has no chat template, so it cannot answer messages: send a plain prompt to "
                "/v1/completions, or serve a checkpoint with a chat template",
                param="messages",
                code="unsupported_parameter",
            )
        if not messages:
            raise InvalidParameterError("messages must not be empty", param="messages")
        own = {"messages", "tools", "add_generation_prompt", *self._tokens}
        taken = own.intersection(variables or ())
        if taken:
            raise InvalidParameterError(
                f"chat_template_kwargs cannot set {min(taken)}, which the template gets from the request and the model",
                param="chat_template_kwargs",
            )
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                {
                    "documents": None,
                    **(variables or {}),
                    "messages": plain,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                    **self._tokens,
                }
            )
        except Exception as error:  # a template is a program run on the client's data: anything may come out of it
            raise InvalidParameterError(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error

    def render_unfinished(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """As `render`, but ending with the last message's content, for the model to go on with.

        Raises:
            InvalidParameterError: as `render`; or the content is not to be found in what the template made of it.
        """
        text = self.render(messages, add_generation_prompt=False, tools=tools, variables=variables)
        content = str(messages[-1].get("content") or "")
        for beginning in (content, content.strip()):  # many templates strip
            place = text.rfind(beginning)
            if beginning and place >= 0:
                return text[: place + len(beginning)]
        raise InvalidParameterError(
            "continue_final_message needs a last message with a text that the chat template keeps",
            param="continue_final_message",
        )


def _mentions(source: str, variable: str) -> bool:
    environment = ImmutableSandboxedEnvironment(extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    return variable in jinja2.meta.find_undeclared_variables(environment.parse(source))


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered like any other."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelLoadError(
            f"the checkpoint's chat template is not valid Jinja ({error}): correct it in chat_template.jinja "
            "or tokenizer_config.json"
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; a prompt wants plain JSON. Positional, because templates call it so."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)
