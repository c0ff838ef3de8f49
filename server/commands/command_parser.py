"""An `argparse` parser whose errors are one line, and name the nearest flag.

Owns the manners of the command line. Refuses to know any command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from peagle.config_field import unknown_key_message
from peagle.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Raises `ConfigError` where `argparse` would print its usage and exit. Flags are never guessed from a prefix."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in `argparse`, except that nothing is unknown: a flag or word that no one asked for is an error."""
        parsed, rest = super().parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("-"):
                flag = word.split("=")[0]
                raise ConfigError(unknown_key_message(flag, list(self._option_string_actions), f"`{self.prog}`"))
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return parsed, rest


class Once(argparse.Action):
    """Stores a value, and refuses a second one, which would silently win. Needs `default=argparse.SUPPRESS`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)
