"""Settings out of range are refused by name; flags and fields are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peagle.errors import ConfigError
from peagle.training.__main__ import build_parser, to_config
from peagle.training.config import DataConfig, HeadOptions, LossOptions, OptimiserOptions, RunOptions
from tests.unit.peagle.training.tiny_run import command_line, tiny_config


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        (DataConfig, "max_length", 7),
        (DataConfig, "held_out", 1.0),
        (DataConfig, "num_soft_targets", 0),
        (HeadOptions, "method", "medusa"),
        (HeadOptions, "layers", 0),
        (HeadOptions, "depth", 33),
        (HeadOptions, "draft_vocab_size", 1),
        (HeadOptions, "norm_taps", (0, 0)),
        (LossOptions, "loss", "mse"),
        (LossOptions, "depth_decay", 0.0),
        (LossOptions, "retention", 1.5),
        (LossOptions, "retention_floor", -0.1),
        (LossOptions, "segments", 0),
        (OptimiserOptions, "learning_rate", 0.0),
        (OptimiserOptions, "batch_size", 0),
        (OptimiserOptions, "warmup_steps", -1),
        (OptimiserOptions, "weight_decay", -0.1),
        (OptimiserOptions, "max_grad_norm", 0.0),
        (RunOptions, "max_tokens", 0),
        (RunOptions, "checkpoint_interval", 0),
        (RunOptions, "eval_limit", -1),
        (RunOptions, "seed", -1),
        (RunOptions, "num_threads", 0),
        (RunOptions, "compute_dtype", "float16"),
    ],
)
def test_a_value_out_of_range_is_named(group: type, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        group(**{name: value})


def test_flags_say_what_fields_say(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, cache_dir=tmp_path / "cache", from_target=False, train_lm_head=True, start_from=tmp_path / "x"
    )
    assert to_config(build_parser().parse_args(command_line(config))) == config


def test_a_missing_target_is_named(tmp_path: Path) -> None:
    words = ["--target", str(tmp_path), "--data", "d", "--output", "o"]
    with pytest.raises(ConfigError, match="no target at"):
        to_config(build_parser().parse_args(words))
