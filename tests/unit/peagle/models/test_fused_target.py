"""What the fused loop takes, and what it must leave to `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.models.fused_target import FusedTarget
from peagle.models.transformers_target import TransformersTarget
from tests.builders.model import build_model, write_model
from tests.builders.runner import (
    RunnerSizes,
    eager_padding,
    greedy_answer,
    greedy_sequence,
    make_loop,
    make_prompts,
    make_runner,
    run_step,
)

SIZES = RunnerSizes(num_speculative_tokens=0)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ({}, FusedTarget),
        ({"attention_bias": True, "mlp_bias": True}, FusedTarget),
        ({"tie_word_embeddings": True}, FusedTarget),
        ({"head_dim": 16, "num_key_value_heads": 1}, FusedTarget),
        ({"hidden_act": "gelu"}, TransformersTarget),  # the loop has SiLU written into it
    ],
)
def test_variants_of_llama_equal_the_unmodified_model(overrides: dict[str, Any], path: type, tmp_path: Path) -> None:
    tiny = make_runner(write_model(tmp_path, **overrides), SIZES, eager_padding(SIZES))
    assert type(tiny.target) is path
    assert tiny.target.dtype == torch.float64
    prompt = make_prompts([7])[0]
    scheduler = make_loop(SIZES, has_drafter=False)
    seq = greedy_sequence(0, prompt, 12)
    scheduler.add(seq)
    while scheduler.has_work:
        run_step(scheduler, [tiny.runner])
    assert seq.output_token_ids == greedy_answer(build_model("llama", **overrides), prompt, 12)
