"""Command line of the benchmark: flags in, exit code out.

Owns flags and the order of the run. Exit code 0: every request was answered; 1: some failed (they are counted and
named); 2: nothing could be measured.

Client and server share the machine in many runs. Pin them to different cores (`taskset`) and watch the `client CPU`
column, or the client is what gets measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from peagle.benchmark import BenchmarkError
from peagle.benchmark.client import first_model, open_client
from peagle.benchmark.load import Level, LoadPlan, Target, run_level
from peagle.benchmark.provenance import describe
from peagle.benchmark.report import build_report, write_report
from peagle.benchmark.workload import (
    GenerationSettings,
    Messages,
    built_in_prompts,
    check_sendable,
    choose_prompts,
    read_prompts,
)

DEFAULT_ROUNDS = 1
DEFAULT_ROUNDS_COMPARED = 2  # A/B/A/B: one repetition shows how far the ratio moves by itself


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark with `argv` (default: the process's own) and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(words)
    try:
        return _run(args, words)
    except BenchmarkError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The flags. Abbreviations are off, so that a secret flag has one spelling to mask."""
    parser = argparse.ArgumentParser(
        prog="peagle bench",
        description="Measure an OpenAI-compatible chat endpoint from outside, with a closed loop per concurrency. "
        "stdout gets a table and, as its last line, one JSON object; progress goes to stderr.",
        allow_abbrev=False,
    )
    server = parser.add_argument_group("servers")
    server.add_argument("--base-url", type=_base_url, default="http://127.0.0.1:8000/v1", help="with or without /v1")
    server.add_argument("--model", help="default: the first that the server lists")
    server.add_argument("--api-key", help="sent as a bearer token; masked in the report")
    server.add_argument("--compare", type=_base_url, metavar="URL", help="second server (B): rounds alternate A/B/A/B")
    server.add_argument("--compare-model", metavar="MODEL", help="its model; default: the first that it lists")
    server.add_argument("--compare-api-key", metavar="KEY", help="its bearer token; masked in the report")
    work = parser.add_argument_group("workload")
    work.add_argument("--dataset", type=Path, help="JSONL with messages, prompt or turns; default: built-in prompts")
    work.add_argument("--num-prompts", type=_positive_int, default=32, help="requests per round")
    work.add_argument("--max-tokens", type=_positive_int, default=64)
    work.add_argument("--temperature", type=_finite_float, default=0.0)
    work.add_argument("--seed", type=int, default=0, help="order of the prompts, and sampling seed (+ prompt index)")
    work.add_argument("--ignore-eos", action="store_true", help="fixed-length answers; servers may refuse it")
    work.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="fields for every request")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=_concurrencies, default=[1, 4, 8, 16], metavar="N,N,...")
    load.add_argument(
        "--repeat",
        type=_positive_int,
        help=f"rounds per concurrency; default {DEFAULT_ROUNDS}, with --compare {DEFAULT_ROUNDS_COMPARED}",
    )
    load.add_argument("--timeout-s", type=_positive_float, default=300.0, help="bound of one request")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON there")
    return parser


def _run(args: argparse.Namespace, words: Sequence[str]) -> int:
    _check(args)
    provenance = describe(words)
    available = read_prompts(args.dataset) if args.dataset else built_in_prompts()
    plan = _plan(args, available)
    levels = asyncio.run(_measure(args, plan))
    settings = {
        "dataset": str(args.dataset) if args.dataset else "built-in",
        "num_prompts": args.num_prompts,
        "num_distinct_prompts": min(args.num_prompts, len(available)),
        "concurrency": args.concurrency,
        "num_rounds": plan.num_rounds,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "ignore_eos": args.ignore_eos,
        "extra_body": args.extra_body,
        "timeout_s": args.timeout_s,
    }
    report = build_report(levels, provenance=provenance, settings=settings)
    write_report(levels, report, output=args.output)
    return 1 if report["failures"]["total"] else 0


def _check(args: argparse.Namespace) -> None:
    if args.num_prompts < max(args.concurrency):
        raise BenchmarkError(
            f"--num-prompts {args.num_prompts} cannot keep {max(args.concurrency)} requests in flight; "
            "raise it or lower --concurrency"
        )
    if not args.compare and (args.compare_model or args.compare_api_key):
        raise BenchmarkError("--compare-model and --compare-api-key need --compare URL")
    if args.output and not args.output.parent.is_dir():
        raise BenchmarkError(f"--output: there is no directory {args.output.parent}")


def _plan(args: argparse.Namespace, available: Sequence[Messages]) -> LoadPlan:
    return LoadPlan(
        prompts=choose_prompts(available, num_prompts=args.num_prompts, seed=args.seed),
        settings=GenerationSettings(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
            ignore_eos=args.ignore_eos,
            extra_body=args.extra_body,
        ),
        timeout_s=args.timeout_s,
        num_rounds=args.repeat or (DEFAULT_ROUNDS_COMPARED if args.compare else DEFAULT_ROUNDS),
    )


async def _measure(args: argparse.Namespace, plan: LoadPlan) -> list[Level]:
    async with AsyncExitStack() as clients:

        async def target(name: str, base_url: str, *, model: str | None, api_key: str | None) -> Target:
            client = open_client(base_url, api_key=api_key, max_connections=max(args.concurrency))
            await clients.enter_async_context(client)
            return Target(name=name, client=client, model=model or await first_model(client, timeout_s=args.timeout_s))

        targets = [await target("A", args.base_url, model=args.model, api_key=args.api_key)]
        if args.compare:
            targets.append(await target("B", args.compare, model=args.compare_model, api_key=args.compare_api_key))
        levels: list[Level] = []
        for concurrency in args.concurrency:
            levels += await run_level(plan, targets, concurrency=concurrency, open_progress=_progress_bar)
        return levels


@contextmanager
def _progress_bar(title: str, total: int) -> Iterator[Callable[[], object]]:
    """Progress of one round, on stderr."""
    with tqdm(total=total, desc=title, file=sys.stderr, mininterval=0.5) as bar:
        yield bar.update


def _base_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query:
        raise argparse.ArgumentTypeError(f"{text!r} is no plain http(s) URL; keys go into --api-key")
    path = url.path.rstrip("/")
    return str(url.copy_with(path=path if path.endswith("/v1") else f"{path}/v1"))


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def _positive_float(text: str) -> float:
    value = _finite_float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _concurrencies(text: str) -> list[int]:
    values = [_positive_int(part) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text}: a concurrency is named twice; use --repeat for more rounds")
    return values


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        check_sendable(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


if __name__ == "__main__":
    sys.exit(main())
