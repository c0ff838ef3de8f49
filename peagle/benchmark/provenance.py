"""Where numbers come from: command line, versions, commit, machine.

Owns describing this process and the machine it runs on. Refuses to describe the server's machine, which it cannot see.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

SECRET_FLAGS = frozenset({"--api-key", "--compare-api-key"})
SIMD_FLAGS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8")


def describe(argv: Sequence[str]) -> dict[str, Any]:
    """All of it, ready for JSON, secrets masked."""
    return {
        "argv": mask_secrets(argv),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_commit(Path(__file__).parent),
        "versions": {"python": platform.python_version(), **_package_versions("peagle", "httpx", "httpcore", "h11")},
        "client_machine": machine(Path("/proc/cpuinfo")),
    }


def mask_secrets(argv: Sequence[str]) -> list[str]:
    """`argv` with the values of secret flags replaced, in both spellings (`--flag value`, `--flag=value`)."""
    masked: list[str] = []
    for word in argv:
        flag, equals, _ = word.partition("=")
        if masked and masked[-1] in SECRET_FLAGS:
            masked.append("***")
        elif flag in SECRET_FLAGS and equals:
            masked.append(f"{flag}=***")
        else:
            masked.append(word)
    return masked


def git_commit(directory: Path) -> dict[str, Any] | None:
    """The commit that holds `directory` and whether tracked files differ from it; None without git or a commit."""
    sha = _git(directory, "rev-parse", "HEAD")
    if not sha:
        return None
    return {"sha": sha, "has_local_changes": bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))}


def machine(cpuinfo: Path) -> dict[str, Any]:
    """Processor and system. Where there is no /proc/cpuinfo the platform's own word for the processor has to do."""
    fields = _first_processor(cpuinfo)
    simd = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "simd": [flag for flag in SIMD_FLAGS if flag in simd],
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "system": platform.platform(),
    }


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    if not cpuinfo.exists():
        return {}
    first, _, _ = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _package_versions(*names: str) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git(directory: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", directory, *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
