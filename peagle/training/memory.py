"""Peak memory of a training step against sequence length and segments: `python -m peagle.training.memory`.

Each point is a process of its own, since memory once taken shows in its peak for ever; a step may be given a limit of
address space, so that one sees what no longer fits. The conversation is random, the head of a real size. Owns the
measurement and its table. Refuses to say anything about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peagle.config import parse_bytes

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement; `step_mib` is None if the step did not fit."""

    num_tokens: int
    num_segments: int
    step_mib: float | None  # what the step took beyond what was there before it


def main(words: Sequence[str]) -> int:
    """Measure and write a table, and JSON as the last line; returns the exit code."""
    args = _parser().parse_args(words)
    if args.point:
        num_tokens, num_segments = args.point
        limit = parse_bytes(args.limit) if args.limit else None
        mib = measure(num_tokens, num_segments, num_layers=args.layers, depth=args.depth, limit=limit)
        sys.stdout.write(f"{mib}\n")
        return 0
    points = []
    sys.stdout.write(f"{'tokens':>8}" + "".join(f"{f'S={number}':>10}" for number in args.segments) + "   MiB a step\n")
    for num_tokens in args.tokens:
        row = [_in_process(num_tokens, number, args) for number in args.segments]
        shown = "".join(f"{'-' if point.step_mib is None else f'{point.step_mib:.0f}':>10}" for point in row)
        sys.stdout.write(f"{num_tokens:>8}{shown}\n")
        sys.stdout.flush()
        points += row
    record = {
        "limit": args.limit,
        "layers": args.layers,
        "depth": args.depth,
        "points": [asdict(one) for one in points],
    }
    sys.stdout.write(json.dumps(record) + "\n")
    return 0


def measure(num_tokens: int, num_segments: int, *, num_layers: int, depth: int, limit: int | None) -> float:
    """MiB that one step takes at its peak, in this process; more than the truth if the process took more before."""
    import numpy as np
    import torch

    from peagle.drafter.head import DraftHead
    from peagle.drafter.head_config import HeadConfig
    from peagle.training.config import LossOptions
    from peagle.training.dataset import Example
    from peagle.training.features import TargetFeatures
    from peagle.training.peagle_step import PEagleStep

    torch.set_num_threads(1)
    config = HeadConfig(
        hidden_size=576,
        target_hidden_size=576,
        aux_layer_ids=(2, 15, 27),
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=12288,
        draft_vocab_size=12288,
        mask_token_id=0,
        max_position_embeddings=num_tokens,
    )
    torch.manual_seed(0)
    head = DraftHead(config)
    head.embed_tokens.requires_grad_(False)
    head.lm_head.requires_grad_(False)
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # it belongs to the head, not to the sequence
    is_supervised = np.arange(num_tokens) >= num_tokens // 4
    example = Example(token_ids=np.ones(num_tokens, dtype=np.int64), is_supervised=is_supervised, is_greedy=True)
    num_rows = int(is_supervised.sum())
    features = TargetFeatures(
        features=torch.randn(num_tokens, config.feature_size, dtype=torch.bfloat16),
        rows=torch.from_numpy(np.flatnonzero(is_supervised[1:])),
        top_ids=torch.arange(64).expand(num_rows, 64),
        top_log_probs=torch.full((num_rows, 64), -4.2),
    )
    options = LossOptions(segments=num_segments)
    step = PEagleStep(head, torch.arange(12288), depth=depth, options=options, compute_dtype=torch.bfloat16)
    if limit is not None:
        _limit_growth(limit)
    before = _peak_bytes()
    step.backward(example, features, np.random.default_rng(0), scale=1.0)
    return (_peak_bytes() - before) / _MIB


def _in_process(num_tokens: int, num_segments: int, args: argparse.Namespace) -> Point:
    words = [sys.executable, "-m", "peagle.training.memory", "--point", str(num_tokens), str(num_segments)]
    words += ["--layers", str(args.layers), "--depth", str(args.depth), "--limit", args.limit]
    # Freed memory goes back at once, or the peak would show the allocator's habits.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(_MIB), "MALLOC_TRIM_THRESHOLD_": str(_MIB)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    # Some libraries meet the limit with an abort.
    is_too_much = args.limit and (done.returncode < 0 or "memory" in done.stderr or "bad_alloc" in done.stderr)
    if done.returncode and not is_too_much:
        raise RuntimeError(done.stderr)
    step_mib = None if done.returncode else float(done.stdout)
    return Point(num_tokens=num_tokens, num_segments=num_segments, step_mib=step_mib)


def _limit_growth(num_bytes: int) -> None:
    """From here on, this process gets no more address space than so much beyond what it has."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + num_bytes, most))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m peagle.training.memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tokens", type=_numbers, default=[512, 1024, 2048, 4096], help="lengths, comma-separated")
    parser.add_argument("--segments", type=_numbers, default=[1, 2, 3, 6], help="S, comma-separated")
    parser.add_argument("--layers", type=int, default=3, help="of the head (3)")
    parser.add_argument("--depth", type=int, default=6, help="K (6)")
    parser.add_argument("--limit", default="", help="address space that a step may take, such as 4GB; default: any")
    parser.add_argument("--point", type=int, nargs=2, metavar=("TOKENS", "SEGMENTS"), help="this one, in this process")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
