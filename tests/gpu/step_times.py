"""How long a decoding step takes on a CUDA device, eagerly and captured. Prints one JSON object.

The target has the shape of SmolLM2-135M and random weights in bfloat16: the time of a step depends on shapes alone.
A step is `ModelRunner.execute`: packing, target pass, verification, with K > 0 the draft pass, and the copy to the
host, which waits for the device. Every sequence has 256 tokens, and K drafts that are almost always wrong.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from peagle.outputs import ScheduledSequence, SchedulerOutput
from peagle.runner.model_runner import ModelRunner
from peagle.sampling_params import SamplingParams
from tests.builders.head import tiny_head
from tests.builders.model import write_model
from tests.builders.runner import RunnerSizes, fixed_padding, make_graphed_drafter, make_runner

BATCH_SIZES = (1, 8, 32)
DRAFTS = (0, 4)
CONTEXT = 256
BLOCK_SIZE = 16
WARM_STEPS, TIMED_STEPS = 5, 30
SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


def build_runner(directory: Path, sizes: RunnerSizes, *, capture: bool) -> ModelRunner:
    padding = fixed_padding(sizes)
    drafter = None
    if sizes.num_speculative_tokens:
        head = tiny_head(
            dtype=torch.bfloat16,
            target_hidden_size=SHAPE["hidden_size"],
            aux_layer_ids=(2, 15, 27),
            draft_vocab_size=SHAPE["vocab_size"],
            **SHAPE,
        )
        drafter = make_graphed_drafter(head.to("cuda"), sizes, padding, capture=capture)
    return make_runner(directory, sizes, padding, drafter, dtype=torch.bfloat16, device="cuda", capture=capture).runner


def build_step(num_seqs: int, num_drafts: int) -> SchedulerOutput:
    num_blocks = -(-(CONTEXT + 2 * num_drafts) // BLOCK_SIZE)
    scheduled = []
    for seq_id in range(num_seqs):
        table = list(range(seq_id * num_blocks, (seq_id + 1) * num_blocks))
        scheduled.append(
            ScheduledSequence(
                seq_id=seq_id,
                start=CONTEXT - 1,
                token_ids=list(range(seq_id, seq_id + num_drafts + 1)),
                num_draft_tokens=num_drafts,
                is_sampling=True,
                next_token_id=None,
                max_next_drafts=num_drafts,
                block_table=table,
                drafter_block_table=table if num_drafts else (),
                params=SamplingParams(temperature=0.0),
                seed=0,
            )
        )
    return SchedulerOutput(scheduled=tuple(scheduled), num_scheduled_tokens=num_seqs * (num_drafts + 1))


def median_ms(runner: ModelRunner, step: SchedulerOutput) -> float:
    times = []
    for _ in range(WARM_STEPS + TIMED_STEPS):
        begin = time.perf_counter()
        runner.execute(step)
        times.append((time.perf_counter() - begin) * 1000)
    return round(statistics.median(times[WARM_STEPS:]), 3)


def measure(directory: Path, num_drafts: int) -> list[dict[str, float]]:
    sizes = RunnerSizes(
        num_speculative_tokens=num_drafts,
        max_num_seqs=BATCH_SIZES[-1],
        max_model_len=CONTEXT * 2,
        block_size=BLOCK_SIZE,
        num_blocks=BATCH_SIZES[-1] * CONTEXT * 2 // BLOCK_SIZE,
    )
    eager, captured = (build_runner(directory, sizes, capture=capture) for capture in (False, True))
    rows = []
    for num_seqs in BATCH_SIZES:
        step = build_step(num_seqs, num_drafts)
        rows.append(
            {
                "num_seqs": num_seqs,
                "num_speculative_tokens": num_drafts,
                "eager_ms": median_ms(eager, step),
                "captured_ms": median_ms(captured, step),
            }
        )
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        target = write_model(Path(directory), num_hidden_layers=30, dtype=torch.bfloat16, **SHAPE)
        steps = [row for num_drafts in DRAFTS for row in measure(target, num_drafts)]
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": steps}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
