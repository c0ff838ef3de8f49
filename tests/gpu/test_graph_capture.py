"""Captured steps against eager ones on a CUDA device. Everything but the capture is tested without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle.cuda_graphs.buffers import BufferSpec, StaticBuffers
from peagle.cuda_graphs.graph_runner import GraphRunner
from peagle.runner.warmup import warm_up
from tests.builders.head import tiny_head
from tests.builders.model import build_model, write_model
from tests.builders.runner import (
    RunnerSizes,
    ScriptedDrafter,
    TinyRunner,
    fixed_padding,
    greedy_answer,
    greedy_sequence,
    make_graphed_drafter,
    make_loop,
    make_prompts,
    make_runner,
    run_step,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = RunnerSizes()
PROMPTS = make_prompts((1, 30, 3, 11, 4, 17))
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    model = build_model("llama")
    return [greedy_answer(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def run_all(runners: list[TinyRunner]) -> list[list[int]]:
    """Answers to all prompts; in every step the runners must agree, drafts included."""
    scheduler = make_loop(SIZES, has_drafter=True)
    sequences = [greedy_sequence(seq_id, prompt, NUM_TOKENS) for seq_id, prompt in enumerate(PROMPTS)]
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.has_work:
        run_step(scheduler, [tiny.runner for tiny in runners])
    return [seq.output_token_ids for seq in sequences]


def test_replay_reads_new_inputs_and_shapes_keep_their_outputs() -> None:
    def double(shape: int, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert inputs["rows"].shape == (shape,)
        return {"rows": inputs["rows"] * 2}

    device = torch.device("cuda")
    runner: GraphRunner[int] = GraphRunner(
        double, StaticBuffers({"rows": BufferSpec((4,), torch.float32)}, device), capture=True
    )
    small = runner.run(2, {"rows": torch.tensor([1.0, 2.0])})["rows"]
    large = runner.run(4, {"rows": torch.arange(4.0)})["rows"]
    assert small.tolist() == [2.0, 4.0]
    assert large.tolist() == [0.0, 2.0, 4.0, 6.0]
    again = runner.run(2, {"rows": torch.tensor([5.0, 6.0])})["rows"]
    assert again.data_ptr() == small.data_ptr()
    assert again.tolist() == [10.0, 12.0]
    assert large.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert (runner.stats.hits, runner.stats.misses) == (1, 2)


def test_captured_verification_equals_eager(checkpoint: Path, answers: list[list[int]]) -> None:
    whole = {seq_id: [*prompt, *answers[seq_id]] for seq_id, prompt in enumerate(PROMPTS)}
    drafter = ScriptedDrafter(whole, SIZES.num_speculative_tokens)
    runners = [
        make_runner(checkpoint, SIZES, fixed_padding(SIZES), drafter, device="cuda", capture=capture)
        for capture in (False, True)
    ]
    assert run_all(runners) == answers


def test_captured_drafts_equal_eager(checkpoint: Path, answers: list[list[int]]) -> None:
    runners = []
    for capture in (False, True):
        padding = fixed_padding(SIZES)
        drafter = make_graphed_drafter(tiny_head().to("cuda"), SIZES, padding, capture=capture)
        runners.append(make_runner(checkpoint, SIZES, padding, drafter, device="cuda", capture=capture))
    for tiny in runners:
        warm_up(
            tiny.runner,
            batch_sizes=fixed_padding(SIZES).batch_sizes.sizes,
            max_num_tokens=SIZES.max_model_len - 1,
            block_size=SIZES.block_size,
            has_drafter=True,
        )
    assert run_all(runners) == answers
