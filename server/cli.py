"""The console command `peagle`: finds the command, runs it, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 it failed, 2 the command line or the configuration is wrong, 130 stopped by Ctrl-C.
Refuses to know what a command does. Nothing imported here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from peagle.errors import ConfigError, PeagleError
from server.commands import chat, fetch, health, serve, train, version
from server.commands.command_parser import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `peagle` with `argv` (default: the process's arguments). Returns the exit code; `--help` exits by itself."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except ConfigError as error:
        return _fail(error, 2)
    except PeagleError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def build_parser() -> CommandParser:
    """The parser with every command."""
    parser = CommandParser(prog="peagle", description="An OpenAI-compatible LLM server with invisible speculation.")
    parser.add_argument("--version", action="version", version=f"peagle {version.installed_version('peagle')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, chat, health, fetch):
        command.add_parser(subparsers)
    train.add_parser(subparsers)
    subparsers.add_parser(
        "bench",
        help="measure a running server; `bench spec`: what speculation brings (see --help of both)",
        add_help=False,
    )
    version.add_parser(subparsers)
    return parser


def _run(words: list[str]) -> int:
    if words[:2] == ["bench", "spec"]:
        from peagle.spec_benchmark.__main__ import main as run_spec_benchmark

        return run_spec_benchmark(words[2:])
    if words[:1] == ["bench"]:  # has a parser of its own, which must see every word, `--help` included
        from peagle.benchmark.__main__ import main as run_benchmark

        return run_benchmark(words[1:])
    if words[:2] == ["train", "run"]:  # likewise
        return train.run_trainer(words[2:])
    args = build_parser().parse_args(words)
    code: int = args.run(args)
    return code


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"peagle: error: {' '.join(str(error).split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
