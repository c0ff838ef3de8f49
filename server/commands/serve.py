"""`peagle serve`: merges the configuration and starts the server.

Owns the flags' help and what happens before the server runs. Refuses to know HTTP and the engine: `server.main` is
imported only once there is something to serve, so that help and `--print-config` are instant.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Literal, get_args, get_origin

from peagle.errors import ConfigError
from peagle.spec_config import SpecConfig
from server.commands.command_parser import Once
from server.commands.vllm_flags import SPELLINGS, add_vllm_flags, take_vllm_flags
from server.config_options import ConfigKey, config_groups
from server.config_report import render_settings
from server.config_sources import CONFIG_FLAG, load_settings
from server.config_values import without_none

_DESCRIPTION = "Serve a model over the OpenAI API."
_EPILOG = """\
Every flag is also an environment variable (--max-num-seqs is PEAGLE_MAX_NUM_SEQS) and a key of the YAML file of
--config (max_num_seqs). A flag beats the environment, which beats the file, which beats the default.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        usage="peagle serve [MODEL] [flags]",
        help="start the server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_word", nargs="?", metavar="MODEL", help="the same as --model, as other servers have it")
    parser.add_argument(
        CONFIG_FLAG,
        dest="config",
        metavar="FILE",
        action=Once,
        default=argparse.SUPPRESS,
        help="YAML file of keys and values (variable: PEAGLE_CONFIG)",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the effective configuration and where each value comes from, then exit",
    )
    for group in config_groups():
        arguments = parser.add_argument_group(group.title)
        for key in group.keys:
            _add_flag(arguments, key)
    add_vllm_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Returns the exit code."""
    flags = dict(vars(args))
    word = flags.pop("model_word")
    told = take_vllm_flags(flags)
    if word is not None and "model" in flags:
        raise ConfigError(f"the model is given twice: {word} and --model {flags['model']}")
    loaded = load_settings(flags=flags if word is None else flags | {"model": word}, environment=os.environ)
    if args.print_config:
        sys.stdout.write(render_settings(loaded))
        return 0
    for sentence in told:
        sys.stderr.write(f"peagle: warning: {sentence}\n")
    from server.main import run as run_server

    return run_server(loaded.settings)


def _add_flag(arguments: argparse._ArgumentGroup, key: ConfigKey) -> None:
    kind = without_none(key.annotation)
    text = _help(key).replace("%", "%%")  # argparse formats help texts
    if kind is bool:
        arguments.add_argument(
            key.flag, dest=key.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
        return
    arguments.add_argument(
        *(key.flag, *SPELLINGS.get(key.name, ())),
        dest=key.name,
        action=Once,
        default=argparse.SUPPRESS,
        metavar=_metavar(key, kind),
        help=text,
    )


def _help(key: ConfigKey) -> str:
    if key.default is None or isinstance(key.default, SpecConfig):
        return key.help
    default = str(key.default).lower() if isinstance(key.default, bool) else key.default
    return f"{key.help} (default: {default})"


def _metavar(key: ConfigKey, kind: Any) -> str:
    if key.name.endswith("_bytes"):
        return "SIZE"
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        return "N,N,..." if get_args(kind)[0] is int else "NAME,..."
    return {str: "TEXT", int: "N", float: "SECONDS", SpecConfig: "JSON"}[kind]
