"""Flags of `vllm serve` that a command line copied from a model card may have, and that have no counterpart here.

Owns their list. They change how fast vLLM is and never what it answers, so leaving them out is safe; but nothing is
ignored in silence: each is named on stderr with what is so instead. A flag that would change more than speed is not
here, and so is refused like any unknown one.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from peagle.errors import ConfigError

_PREFIX = "vllm_"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlag:
    """One flag.

    Attributes:
        names: its spellings.
        instead: what is said of it.
        takes_value: it has a value.
        only: the one value that means what this server does anyway; None: any.
    """

    names: tuple[str, ...]
    instead: str
    takes_value: bool = True
    only: str | None = None

    @property
    def dest(self) -> str:
        """Where its value goes."""
        return _PREFIX + self.names[0].strip("-").replace("-", "_")


FLAGS = (
    VllmFlag(
        names=("--tensor-parallel-size", "--tp", "-tp"), instead="a model is on one device", only="1"
    ),
    VllmFlag(names=("--async-scheduling", "--no-async-scheduling"), instead="there is one way", takes_value=False),
    VllmFlag(names=("--stream-interval",), instead="the text of every step is sent at once"),
    VllmFlag(names=("--max-cudagraph-capture-size",), instead="--graph-batch-sizes says what is captured"),
    VllmFlag(names=("--enable-auto-tool-choice",), instead="tools are always served", takes_value=False),
)  # fmt: skip


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Let the parser take them; they are not in its help."""
    for flag in FLAGS:
        if flag.takes_value:
            parser.add_argument(*flag.names, dest=flag.dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        else:
            parser.add_argument(
                *flag.names, dest=flag.dest, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )


def take_vllm_flags(given: dict[str, object]) -> list[str]:
    """Take them out of what was parsed; returns a sentence about each.

    Raises:
        ConfigError: a value asks for what is not served.
    """
    told = []
    for flag in FLAGS:
        if flag.dest not in given:
            continue
        value = given.pop(flag.dest)
        if flag.only is not None and value != flag.only:
            raise ConfigError(f"{flag.names[0]} {value} is not supported, only {flag.only} is: {flag.instead}")
        if flag.only is None:
            told.append(f"{flag.names[0]} has no effect here: {flag.instead}")
    return told
