"""Flags of `vllm serve` that a command line copied from a model card may have, and that have no counterpart here.

Owns their list. They change how fast vLLM is and never what it answers, so leaving them out is safe; but nothing is
ignored in silence: each is named on stderr with what is so instead. A flag that would change more than speed is not
here, and so is refused like any unknown one.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

_PREFIX = "vllm_"

# Other spellings of our own flags, by key.
SPELLINGS = {"tensor_parallel_size": ("--tp", "-tp")}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlag:
    """One flag.

    Attributes:
        names: its spellings.
        instead: what is said of it.
        takes_value: it has a value.
    """

    names: tuple[str, ...]
    instead: str
    takes_value: bool = True

    @property
    def dest(self) -> str:
        """Where its value goes."""
        return _PREFIX + self.names[0].strip("-").replace("-", "_")


FLAGS = (
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
    """Take them out of what was parsed; returns a sentence about each."""
    told = []
    for flag in FLAGS:
        if flag.dest not in given:
            continue
        del given[flag.dest]
        told.append(f"{flag.names[0]} has no effect here: {flag.instead}")
    return told
