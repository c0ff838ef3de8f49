"""`peagle version`: the versions that a bug report needs, from package metadata, so that nothing heavy is imported."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("torch", "transformers", "fastapi")


def add_parser(subparsers: Any) -> None:
    """Describe the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "version",
        help="print the versions of peagle and of what it stands on",
        description="Print the versions of peagle and of what it stands on.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line a package. Returns the exit code."""
    lines = [f"peagle {installed_version('peagle')}", f"python {platform.python_version()}"]
    lines += [f"{package} {installed_version(package)}" for package in _PACKAGES]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def installed_version(package: str) -> str:
    """The installed version, or `not installed`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
