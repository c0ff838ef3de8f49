"""`peagle train`: the way from a list of prompts to a draft head, step by step.

Owns the flags of the steps around the trainer and what they print; results go to stdout, progress to stderr. Refuses
to know how anything is done: `peagle.training` is imported when a step begins, and `run` has its own parser there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError

_EVAL_ANSWERS = ("target", "recorded")
_METHODS = ("peagle", "eagle3")
_SHARED_TABLES = ("embeddings", "lm-head")
_LAYOUTS = ("flat", "speculators")


def add_parser(subparsers: Any) -> None:
    """Describe the command and its steps."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a draft head: regenerate answers, run the training, evaluate, export",
        description="Train a draft head for a target: let the target answer prompts (regenerate), train on its answers "
        "(run), measure how many drafts it accepts (eval), and write the head for serving (export).",
    )
    steps = parser.add_subparsers(title="steps", metavar="STEP", required=True)
    _add_regenerate(steps)
    steps.add_parser("run", help="train on answers (see `peagle train run --help`)", add_help=False)
    _add_eval(steps)
    _add_export(steps)
    _add_plot(steps)


def run_trainer(words: list[str]) -> int:
    """`peagle train run`: hand every word, `--help` included, to the trainer. Returns the exit code."""
    from peagle.training.__main__ import main

    return main(words)


def _add_regenerate(steps: Any) -> None:
    parser: argparse.ArgumentParser = steps.add_parser(
        "regenerate",
        help="let a server's model answer prompts",
        description="Let the model of any OpenAI-compatible server answer prompts, and write the conversations as "
        "JSONL. Started again, it goes on where it stopped.",
    )
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSONL with messages")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="answers are appended to it")
    parser.add_argument("--base-url", required=True, metavar="URL", help="of the server, with or without /v1")
    parser.add_argument("--model", help="which of the served models; default: the first")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests under way (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=384, metavar="N", help="longest answer (%(default)s)")
    parser.add_argument(
        "--temperature",
        type=_temperatures,
        default=(0.0, 0.0, 0.7),
        metavar="T,T,...",
        help="given to the prompts in turn (default: 0,0,0.7)",
    )
    parser.add_argument("--licences", nargs="+", default=(), metavar="NAME", help="only prompts under these")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many prompts")
    parser.set_defaults(run=_regenerate)


def _regenerate(args: argparse.Namespace) -> int:
    from peagle.training.regenerate import RegenerateConfig, regenerate

    report = regenerate(
        RegenerateConfig(
            prompts=args.prompts,
            output=args.output,
            base_url=args.base_url,
            model=args.model,
            api_key=args.api_key,
            concurrency=args.concurrency,
            max_tokens=args.max_tokens,
            temperatures=args.temperature,
            licences=tuple(args.licences),
            limit=args.limit,
        )
    )
    sys.stdout.write(report.summary() + "\n")
    nothing_came = report.num_failed > 0 and report.num_answered + report.num_already == 0
    return 1 if nothing_came else 0


def _add_eval(steps: Any) -> None:
    parser: argparse.ArgumentParser = steps.add_parser(
        "eval",
        help="measure how many of a head's drafts the target accepts",
        description="Decode greedily with a head, and print acceptance length and the rate of each position for every "
        "K. Measure on prompts that the head was not trained on.",
    )
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="checkpoint of the target")
    parser.add_argument("--head", type=Path, required=True, metavar="DIR", help="the draft head")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="JSONL of prompts or answers (or .gz)")
    parser.add_argument(
        "--answers",
        choices=_EVAL_ANSWERS,
        default="target",
        help="target: it answers now; recorded: the file's answers at temperature 0 are taken (%(default)s)",
    )
    parser.add_argument(
        "--method",
        choices=_METHODS,
        default="peagle",
        help="peagle drafts all tokens in one pass, eagle3 one after the other (%(default)s)",
    )
    parser.add_argument("--held-out", type=float, default=1.0, metavar="SHARE", help="only this last share of the file")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many prompts")
    parser.add_argument("--max-k", type=int, default=7, metavar="K", help="measure K from 1 up to it (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts answered at once (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ... (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the numbers there, as JSON")
    parser.set_defaults(run=_eval)


def _eval(args: argparse.Namespace) -> int:
    if args.output is not None and not args.output.parent.is_dir():
        raise ConfigError(f"there is no directory {args.output.parent} for the output")
    from peagle.training.evaluate import EvaluateConfig, evaluate
    from peagle.training.evaluation_data import AnswerSource

    report = evaluate(
        EvaluateConfig(
            target=args.target,
            head=args.head,
            data=args.data,
            answers=AnswerSource(args.answers),
            num_speculative_tokens=args.max_k,
            max_new_tokens=args.max_new_tokens,
            held_out=args.held_out,
            limit=args.limit,
            batch_size=args.batch_size,
            method=args.method,
            device=args.device,
            dtype=args.dtype,
        )
    )
    sys.stdout.write(report.table() + "\n")
    if args.output is not None:
        args.output.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return 0


def _add_export(steps: Any) -> None:
    parser: argparse.ArgumentParser = steps.add_parser(
        "export",
        help="write a trained head for serving",
        description="Write a trained head in bfloat16, in a layout that servers load.",
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a run's directory (its newest), or a checkpoint"
    )
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="checkpoint of its target")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="made if needed")
    parser.add_argument(
        "--leave-out",
        nargs="+",
        choices=_SHARED_TABLES,
        default=(),
        metavar="TABLE",
        help=f"take this from the target when serving: {', '.join(_SHARED_TABLES)} (only what was not trained)",
    )
    parser.add_argument(
        "--layout", choices=_LAYOUTS, default="flat", help="flat (as Amazon's heads), or speculators' (%(default)s)"
    )
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from peagle.training.publish import Layout, PublishConfig, SharedTable, publish

    leave_out = frozenset(SharedTable[name.upper().replace("-", "_")] for name in args.leave_out)
    directory = publish(
        PublishConfig(
            checkpoint=args.checkpoint,
            target=args.target,
            output=args.output,
            leave_out=leave_out,
            layout=Layout(args.layout),
        )
    )
    sys.stdout.write(f"{directory}\n")
    return 0


def _add_plot(steps: Any) -> None:
    parser: argparse.ArgumentParser = steps.add_parser(
        "plot",
        help="draw loss and acceptance of a run",
        description="Draw a run's loss, and its acceptance at each position, over response tokens, as a PNG. Works "
        "while the run goes on. Needs matplotlib, which is in the extra `train`.",
    )
    parser.add_argument("--metrics", type=Path, required=True, metavar="FILE", help="the run's metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the PNG")
    parser.set_defaults(run=_plot)


def _plot(args: argparse.Namespace) -> int:
    from peagle.training.metrics_log import read_metrics
    from peagle.training.plot import plot_training

    sys.stdout.write(f"{plot_training(read_metrics(args.metrics), args.output)}\n")
    return 0


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted numbers such as 0,0,0.7; got {text!r}") from None
