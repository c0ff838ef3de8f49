"""`peagle chat`: a conversation in the terminal with a running server.

Owns the conversation and what the keys do. Refuses to know HTTP: `server.chat_client` does that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TextIO

from peagle.errors import ConfigError
from server.chat_client import ChatClient, ChatError

_PROMPT = "> "
_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_parser(subparsers: Any) -> None:
    """Describe the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "chat",
        help="chat with a running server in the terminal",
        description=f"Chat with a running server. In the chat: {_HELP}.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server's API (default: %(default)s)")
    parser.add_argument("--model", help="which of the served models; default: the first")
    parser.add_argument("--system", metavar="TEXT", help="instructions that the whole conversation stands under")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 is the likeliest answer; default: the server's"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this total share")
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampled answers repeatable")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat on the terminal until the user leaves. Returns the exit code."""
    names = ("temperature", "top_p", "seed", "max_tokens")
    sampling = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    with ChatClient(args.url) as client:
        model = choose_model(client, args.model)
        chat = Chat(client=client, model=model, sampling=sampling, system=args.system)
        return chat.talk(stdin=sys.stdin, stdout=sys.stdout)


def choose_model(client: ChatClient, wanted: str | None) -> str:
    """The model to talk to: `wanted`, or the server's first.

    Raises:
        ConfigError: the server has no such model.
        ChatError: the server has no model at all, or is not there.
    """
    names = client.model_names()
    if not names:
        raise ChatError("the server serves no model yet; wait until its /ready says so")
    if wanted is not None and wanted not in names:
        raise ConfigError(f"the server has no model {wanted!r}; it serves {', '.join(names)}")
    return wanted or names[0]


@dataclass(kw_only=True)
class Chat:
    """A conversation.

    Attributes:
        sampling: further fields of each request, such as `temperature`.
        system: the system message; None is none (the model's template may then have its own).
        history: the messages so far, without the system message.
    """

    client: ChatClient
    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    history: list[dict[str, str]] = field(default_factory=list)

    def talk(self, *, stdin: TextIO, stdout: TextIO) -> int:
        """Read lines and answer them until `/exit` or the end of the input. Returns the exit code."""
        stdout.write(f"Talking to {self.model}. {_HELP[0].upper()}{_HELP[1:]}.\n")
        while (line := _ask(stdin, stdout)) is not None:
            if line == "/exit":
                return 0
            if line == "/clear":
                self.history.clear()
                stdout.write("The conversation starts anew.\n")
            elif line.startswith("/"):
                stdout.write(f"No command {line.split()[0]}: {_HELP}.\n")
            elif line:
                self._answer(line, stdout)
        stdout.write("\n")
        return 0

    def _answer(self, question: str, stdout: TextIO) -> None:
        """Stream one answer. What was shown of a stopped answer stays in the history; a failed question does not."""
        self.history.append({"role": "user", "content": question})
        shown: list[str] = []
        try:
            with closing(self._pieces()) as pieces:
                for piece in pieces:
                    shown.append(piece)
                    stdout.write(piece)
                    stdout.flush()
        except KeyboardInterrupt:
            stdout.write(" [stopped]")
        except ChatError as error:
            stdout.write(f"{error}\n")
            self.history.pop()
            return
        stdout.write("\n")
        if shown:
            self.history.append({"role": "assistant", "content": "".join(shown)})
        else:
            self.history.pop()

    def _pieces(self) -> Any:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.client.stream_answer(model=self.model, messages=system + self.history, sampling=self.sampling)


def _ask(stdin: TextIO, stdout: TextIO) -> str | None:
    """The next line without its end, or None at the end of the input. Ctrl-C at the prompt only clears the line."""
    try:
        if stdin is sys.stdin and stdin.isatty():
            line = _input_with_editing()
        else:
            stdout.write(_PROMPT)
            stdout.flush()
            line = stdin.readline()
            if not line:
                return None
    except EOFError:
        return None
    except KeyboardInterrupt:
        stdout.write("\n")
        return ""
    return line.encode("utf-8", "replace").decode("utf-8").strip()  # a terminal may hand over half a character


def _input_with_editing() -> str:
    """A line with arrow keys and recall, where Python has readline."""
    try:
        import readline  # noqa: F401 (importing it is what equips `input`)
    except ImportError:
        pass
    return input(_PROMPT)
