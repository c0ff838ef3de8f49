"""`python -m tests.ops`: runs every scenario against real server processes; one line each, then how many passed."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.builders.engine import write_checkpoint
from tests.ops import drain, faults, fuzz
from tests.ops.overload import overload
from tests.ops.router import RouterMissingError, find_router, lost_replica, rolling_restart
from tests.source_tree import ROOT

Scenario = Callable[[Path, Path], str]


def scenarios(seconds: float, router: Path | None) -> dict[str, Scenario]:
    """By name. Each takes a model and an empty directory, and returns its figures or raises AssertionError."""
    found: dict[str, Scenario] = {
        "fault: steps": faults.step_faults,
        "fault: stuck step": faults.stuck_step,
        "fault: process stopped": faults.stopped_process,
        "fault: client storm": faults.storm,
        "fault: port taken": faults.taken_port,
        "fault: weights truncated": faults.broken_weights,
        "fault: disk full": faults.full_disk,
        "drain: finish": drain.finish,
        "drain: second signal": drain.second_signal,
        "fuzz: wire": fuzz.wire,
        "fuzz: bodies": fuzz.bodies,
        "overload": partial(overload, seconds=seconds),
    }
    if router is not None:
        found["router: rolling restart"] = partial(rolling_restart, router=router)
        found["router: lost replica"] = partial(lost_replica, router=router)
    return found


def install(tools: Path) -> None:
    """The virtual environment of the router, which shares nothing with the servers'."""
    if (tools / "bin" / "vllm-router").exists():
        return
    sys.stdout.write(f"installing vllm-router into {tools}\n")
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    pip = [str(tools / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "-r", str(ROOT / "scripts" / "requirements-ops.txt")], check=True)


def main() -> int:
    """Returns 0 if all passed."""
    parser = argparse.ArgumentParser(prog="make ops-check", description=__doc__)
    parser.add_argument("--only", default="", help="run the scenarios whose names hold this")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--tools", type=Path, default=ROOT / "build" / "ops-tools", help="where vllm-router lies")
    parser.add_argument("--no-install", action="store_true", help="without it, leave the router's scenarios out")
    args = parser.parse_args()
    if not args.no_install:
        install(args.tools.resolve())
    try:
        router = find_router(args.tools.resolve())
    except RouterMissingError as error:
        sys.stdout.write(f"skip   router: {error}\n")
        router = None
    num_passed = num_failed = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = write_checkpoint(root / "tiny")
        for title, scenario in scenarios(args.overload_seconds, router).items():
            if args.only not in title:
                continue
            directory = root / title.replace(":", "").replace(" ", "-")
            directory.mkdir()
            began_at = time.monotonic()
            try:
                verdict, figures = "ok", scenario(model, directory)
                num_passed += 1
            except Exception as error:
                verdict, figures = "FAILED", f"{type(error).__name__}: {error}"
                num_failed += 1
            sys.stdout.write(f"{verdict:6} {title} ({time.monotonic() - began_at:.0f} s): {figures}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{num_passed} passed, {num_failed} failed\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
