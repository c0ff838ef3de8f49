"""Command line of `peagle bench spec`: flags in, a table and one JSON line out.

Owns flags and the order of the run: every variant gets an engine of its own, one after the other, and answers the same
prompts; rounds alternate between the variant and nothing else, so drift shows as rounds that differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from peagle.benchmark.provenance import describe
from peagle.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from peagle.engine.engine import LLMEngine
from peagle.engine.loader import LoadedEngine, load_engine
from peagle.errors import PeagleError
from peagle.sampling_params import SamplingParams
from peagle.spec_benchmark.measure import Round, run_round
from peagle.spec_benchmark.plan import Heads, Variant, plan_variants
from peagle.spec_benchmark.report import Row, render_table
from peagle.spec_config import TreeSpec
from peagle.text.tokenizer import Tokenizer
from peagle.training.prompts import read_prompts

_NUM_WARMUP_PROMPTS = 2


def main(words: Sequence[str]) -> int:
    """Run with command-line words; returns the exit code."""
    args = build_parser().parse_args(words)
    try:
        rows = measure(args)
    except PeagleError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    report = {**describe(["peagle", "bench", "spec", *words]), "rows": [row.as_json() for row in rows]}
    sys.stdout.write(render_table(rows) + "\n" + json.dumps(report) + "\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="peagle bench spec",
        description="Compare ways of drafting on the same prompts in one run, in process: acceptance length and "
        "rates, tokens a second and the ratio to plain decoding. stdout gets a table and one JSON line.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default=ModelConfig().model, help="the target (%(default)s)")
    parser.add_argument("--peagle", metavar="DIR", help="a P-EAGLE head")
    parser.add_argument("--eagle3", metavar="DIR", help="an EAGLE-3 head to compare with")
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="JSONL of prompts (or .gz)")
    parser.add_argument("--num-prompts", type=int, default=16, metavar="N", help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(%(default)s)")
    parser.add_argument("--concurrency", type=_numbers, default=(1, 4, 8), metavar="N,N,...", help="(1,4,8)")
    parser.add_argument("--k", type=_numbers, default=(1, 2, 3, 4, 5, 6, 7), metavar="K,K,...", help="chains (1 to 7)")
    parser.add_argument("--tree", type=_numbers, metavar="N,D", help="also a tree of N branches and depth D")
    parser.add_argument("--lookups", action="store_true", help="also draft by suffixes, without a head")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="per variant; the best counts (%(default)s)")
    return parser


def measure(args: argparse.Namespace) -> list[Row]:
    """Every variant at every concurrency."""
    tree = None if args.tree is None else TreeSpec(num_branches=args.tree[0], depth=args.tree[1])
    variants = plan_variants(
        Heads(peagle=args.peagle, eagle3=args.eagle3), depths=args.k, tree=tree, with_lookups=args.lookups
    )
    params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.max_tokens)
    found: dict[tuple[str, int], tuple[Round, ...]] = {}
    with tqdm(total=len(variants) * len(args.concurrency) * args.rounds, unit="round", file=sys.stderr) as bar:
        for variant in variants:
            bar.set_description(variant.name)
            engines = _engines(args, variant, params)
            for concurrency in args.concurrency:
                rounds = []
                for number in range(args.rounds):
                    engine, prompts = next(engines)
                    name = f"{concurrency}-{number}"
                    rounds.append(run_round(engine, prompts, params, concurrency=concurrency, name=name))
                    bar.update()
                found[variant.name, concurrency] = tuple(rounds)
    return [
        Row(variant=name, concurrency=concurrency, rounds=rounds, plain=found["none", concurrency])
        for (name, concurrency), rounds in sorted(found.items(), key=lambda item: item[0][1])
    ]


def _engines(
    args: argparse.Namespace, variant: Variant, params: SamplingParams
) -> Iterator[tuple[LLMEngine, list[list[int]]]]:
    """An engine and its prompts for each round: the same one, or a new one if answers would be remembered."""
    while True:
        loaded = _load(args.model, variant, max_num_seqs=max(args.concurrency))
        prompts = _encode(args.dataset, loaded.tokenizer, limit=args.num_prompts)
        warm_up = loaded.tokenizer.encode("Say something about the weather.", add_special_tokens=False)
        run_round(loaded.engine, [warm_up] * _NUM_WARMUP_PROMPTS, params, concurrency=2, name="warm-up")
        while True:
            yield loaded.engine, prompts
            if variant.remembers_answers:
                break


def _load(model: str, variant: Variant, *, max_num_seqs: int) -> LoadedEngine:
    # Without the prefix cache every round prefills the same tokens.
    return load_engine(
        EngineConfig(
            model=ModelConfig(model=model),
            cache=CacheConfig(enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
            spec=variant.spec,
        )
    )


def _encode(dataset: Path, tokenizer: Tokenizer, *, limit: int) -> list[list[int]]:
    """Prompts from all over the file: many files are ordered by subject."""
    prompts = read_prompts(dataset)
    chosen = [prompts[index * len(prompts) // min(limit, len(prompts))] for index in range(min(limit, len(prompts)))]
    return [
        tokenizer.encode(tokenizer.chat_template.render(prompt.messages), add_special_tokens=False) for prompt in chosen
    ]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted numbers such as 1,4,8; got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
