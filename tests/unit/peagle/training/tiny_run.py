"""A target, data and settings with which a whole training run takes a second."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.training.config import (
    DataConfig,
    HeadOptions,
    LossOptions,
    OptimiserOptions,
    RunOptions,
    TrainConfig,
)
from tests.builders.model import build_model
from tests.builders.tokenizer import VOCAB_SIZE, build_tokenizer_directory

MASK_TOKEN_ID = 255  # a byte that no text in UTF-8 has
_WORDS = ("the", "hello", "in", "on", "then", "all", "er", "tell", "hill", "\n\n", "well", "thin")


def write_target(directory: Path, *, seed: int = 0) -> Path:
    """A tiny Llama with the tiny tokenizer."""
    model = build_model("llama", seed=seed, dtype=torch.float32, vocab_size=VOCAB_SIZE)
    model.save_pretrained(str(directory))
    return build_tokenizer_directory(directory)


def record(number: int, *, num_words: int = 8, **fields: Any) -> dict[str, Any]:
    """A conversation of one turn, answered greedily or so it says."""
    words = [_WORDS[(number * 5 + place * (number + 1)) % len(_WORDS)] for place in range(num_words)]
    messages = [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": " ".join(words)}]
    return {"messages": messages, "temperature": 0, "finish_reason": "stop", **fields}


def write_data(path: Path, records: Sequence[dict[str, Any]] | None = None) -> Path:
    """Chat JSONL; ten conversations by default."""
    chosen = [record(number) for number in range(10)] if records is None else records
    path.write_text("".join(json.dumps(one) + "\n" for one in chosen), encoding="utf-8")
    return path


def tiny_config(directory: Path, *, output: str = "run", **changes: Any) -> TrainConfig:
    """Settings of a run on `directory`'s `target` and `data.jsonl`, made if they are not there.

    Args:
        directory: of everything.
        output: name of the run.
        changes: fields of any group, by name.
    """
    if not (directory / "target").exists():
        write_target(directory / "target")
    if not (directory / "data.jsonl").exists():
        write_data(directory / "data.jsonl")
    groups: dict[str, Any] = {
        "data_options": DataConfig(max_length=128, held_out=0.2, num_soft_targets=8),
        "head": HeadOptions(layers=1, depth=3, draft_vocab_size=100, taps=(1, 2, 3), mask_token_id=MASK_TOKEN_ID),
        "loss": LossOptions(),
        "optimiser": OptimiserOptions(batch_size=2, warmup_steps=2, learning_rate=2e-3),
        "run": RunOptions(
            max_tokens=200,
            checkpoint_interval=2,
            log_interval=1,
            eval_interval=1000,
            eval_limit=2,
            compute_dtype="float32",
            num_threads=1,
        ),
    }
    for name, group in groups.items():
        own = {
            key: changes.pop(key) for key in list(changes) if key in {field.name for field in dataclasses.fields(group)}
        }
        groups[name] = dataclasses.replace(group, **own)
    assert not changes
    return TrainConfig(
        target=directory / "target", data=(directory / "data.jsonl",), output=directory / output, **groups
    )


def command_line(config: TrainConfig) -> list[str]:
    """Words for `python -m peagle.training` that say the same."""
    words = ["--target", str(config.target), "--data", *map(str, config.data), "--output", str(config.output)]
    for group in (config.data_options, config.head, config.loss, config.optimiser, config.run):
        for field in dataclasses.fields(group):
            value, flag = getattr(group, field.name), field.name.replace("_", "-")
            if value is None:
                continue
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words


def trained_weights(checkpoint: Path) -> dict[str, Any]:
    """Weights and optimiser of a checkpoint, flat."""
    state = torch.load(checkpoint / "training.pt", weights_only=True)
    moments = state["optimiser"]["state"]
    of_optimiser = {f"{index}.{key}": value for index, of in moments.items() for key, value in of.items()}
    return {**state["trained"], **of_optimiser}


def assert_same_weights(first: Path, second: Path) -> None:
    """Bit for bit, optimiser included."""
    ours, theirs = trained_weights(first), trained_weights(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
