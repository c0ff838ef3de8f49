"""Run by torchrun in `test_tensor_parallel`: one rank of a tiny model. Rank 0 writes its answers down."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from peagle import SpecConfig, follow_engine, load_engine
from peagle.engine.engine import LLMEngine
from tests.builders.engine import ask, engine_config, make_request

Answers = dict[str, Any]


def answer(engine: LLMEngine) -> Answers:
    """Tokens and log probabilities of some answers, greedy and drawn, to prompts of several lengths."""
    requests = [
        make_request(str(seed), [1 + seed, 2, 3, *range(4, 4 + 3 * seed)], max_tokens=24, logprobs=2, **values)
        for seed, values in enumerate(
            [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.2, "seed": 8, "top_p": 0.9}] * 2
        )
    ]
    return {
        name: {
            "token_ids": found.token_ids,
            "logprobs": [entry.logprob for output in found.outputs for entry in output.logprobs or ()],
            "accepted": found.last.spec_stats.num_accepted_tokens if found.last.spec_stats else 0,
        }
        for name, found in ask(engine, *requests).items()
    }


def main() -> None:
    target, spec, output = sys.argv[1:]
    config = engine_config(Path(target), spec=SpecConfig.from_mapping(json.loads(spec)), tensor_parallel_size=2)
    if os.environ["RANK"] != "0":
        follow_engine(config)
        return
    Path(output).write_text(json.dumps(answer(load_engine(config).engine)), encoding="utf-8")


if __name__ == "__main__":
    main()
