"""`peagle train run`, also `python -m peagle.training`: flags to a run, and its result to the terminal.

The flags are built from the fields of the configuration groups. Owns parsing and printing. Refuses to know how a head
is trained.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from peagle.errors import ConfigError, PeagleError
from peagle.training.config import DataConfig, HeadOptions, LossOptions, OptimiserOptions, RunOptions, TrainConfig

_GROUPS: dict[str, type] = {
    "data_options": DataConfig,
    "head": HeadOptions,
    "loss": LossOptions,
    "optimiser": OptimiserOptions,
    "run": RunOptions,
}


def main(words: Sequence[str]) -> int:
    """Run with command-line words; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        config = to_config(build_parser().parse_args(words))
        from peagle.training.trainer import run  # torch and transformers take seconds, and --help needs neither

        result = run(config, argv=["peagle", "train", "run", *words])
    except PeagleError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command goes on from the last checkpoint\n")
        return 130
    summary = {
        "step": result.progress.step,
        "num_tokens": result.progress.num_tokens,
        "held_out_acceptance_length": result.acceptance_length,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
    }
    if os.environ.get("RANK", "0") == "0":  # torchrun's; the others have nothing to add
        sys.stdout.write(json.dumps(summary) + "\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All flags, by group."""
    parser = argparse.ArgumentParser(
        prog="peagle train run",
        description="Train a draft head on the target's own answers. Started again with the same words, a run goes on "
        "from its last checkpoint. Under torchrun the conversations of a step are shared among the processes.",
    )
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="checkpoint of the target")
    parser.add_argument("--data", type=Path, required=True, nargs="+", metavar="FILE", help="chat JSONL with answers")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="checkpoints and metrics go there")
    for group in _GROUPS.values():
        section = parser.add_argument_group((group.__doc__ or "").split(".")[0])
        hints = get_type_hints(group)
        for field in fields(group):
            _add_flag(section, field, hints[field.name])
    return parser


def to_config(args: argparse.Namespace) -> TrainConfig:
    """The configuration of parsed flags.

    Raises:
        ConfigError: a value is out of range.
    """
    groups = {
        name: group(**{field.name: getattr(args, field.name) for field in fields(group)})
        for name, group in _GROUPS.items()
    }
    if not (args.target / "config.json").is_file():
        raise ConfigError(f"no target at {args.target}: config.json is missing")
    return TrainConfig(target=args.target, data=tuple(args.data), output=args.output, **groups)


def _add_flag(section: Any, field: Field[Any], hint: Any) -> None:
    flag = "--" + field.name.replace("_", "-")
    shown = "" if field.default is None else f" ({_show(field.default)})"
    options: dict[str, Any] = {"default": field.default, "help": field.metadata["help"].replace("%", "%%") + shown}
    if get_origin(hint) is Literal:
        section.add_argument(flag, choices=get_args(hint), **options)
    elif hint is bool:
        section.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    else:
        reader, metavar = _reader(hint)
        section.add_argument(flag, type=reader, metavar=metavar, **options)


def _reader(hint: Any) -> tuple[Callable[[str], Any], str]:
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    kind = kinds[0] if get_origin(hint) in (Union, types.UnionType) else hint
    if get_origin(kind) is tuple:
        return _numbers, "N,N,..."
    return kind, {int: "N", float: "X", Path: "DIR", str: "TEXT"}[kind]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted numbers such as 2,15,27; got {text!r}") from None


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
