"""Whole runs: what they write, that they go on where they stopped, and from where another run ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from peagle.drafter.head_config import TargetShape
from peagle.drafter.loader import load_head
from peagle.errors import ConfigError
from peagle.training.checkpoint import checkpoints_in
from peagle.training.config import Method
from peagle.training.metrics_log import read_metrics
from peagle.training.trainer import example_at, run
from tests.builders.tokenizer import VOCAB_SIZE
from tests.source_tree import ROOT
from tests.unit.peagle.training.conversation import random_conversation
from tests.unit.peagle.training.tiny_run import (
    assert_same_weights,
    command_line,
    record,
    tiny_config,
    trained_weights,
    write_data,
)

METHODS = pytest.mark.parametrize("method", ["peagle", "eagle3"])


def mask_of(method: Method) -> int | None:
    return 255 if method == "peagle" else None


@METHODS
def test_a_run_leaves_a_head_metrics_a_picture_and_where_it_came_from(tmp_path: Path, method: Method) -> None:
    config = tiny_config(tmp_path, method=method, mask_token_id=mask_of(method), eval_interval=2, keep_checkpoints=2)
    result = run(config, argv=["peagle", "train", "run"])
    assert result.progress.num_tokens >= 200
    assert result.acceptance_length is not None
    assert result.checkpoint is not None
    assert checkpoints_in(config.output)[-1] == result.checkpoint
    assert len(checkpoints_in(config.output)) == 2
    assert (config.output / "training.png").read_bytes().startswith(b"\x89PNG")
    for directory in (config.output, *checkpoints_in(config.output)):
        provenance = json.loads((directory / "provenance.json").read_text())
        assert provenance["data"][0]["name"] == "data.jsonl"
    entries = read_metrics(config.output / "metrics.jsonl")
    assert [one["step"] for one in entries if "loss" in one] == list(range(1, result.progress.step + 1))
    assert all(len(one["acceptance"]) == 3 for one in entries if "acceptance" in one)


def test_a_checkpoint_is_a_head_that_can_be_served(tmp_path: Path) -> None:
    result = run(tiny_config(tmp_path))
    assert result.checkpoint is not None
    head = load_head(result.checkpoint, target=TargetShape(num_layers=4, hidden_size=32, vocab_size=VOCAB_SIZE))
    for name, tensor in trained_weights(result.checkpoint).items():
        if name in dict(head.named_parameters()):
            assert torch.equal(dict(head.named_parameters())[name], tensor)


@METHODS
@pytest.mark.parametrize("cache", [True, False])
def test_stopping_changes_nothing(tmp_path: Path, method: Method, cache: bool) -> None:
    changes = {"method": method, "mask_token_id": mask_of(method)}
    if cache:
        changes["cache_dir"] = tmp_path / "cache"  # type: ignore[assignment]
    part = run(tiny_config(tmp_path, output="parts", max_tokens=150, **changes))
    whole = run(tiny_config(tmp_path, output="whole", max_tokens=400, **changes))
    parts = run(tiny_config(tmp_path, output="parts", max_tokens=400, **changes))
    assert 0 < part.progress.step < parts.progress.step
    assert parts.progress == whole.progress
    assert whole.checkpoint is not None
    assert parts.checkpoint is not None
    assert_same_weights(whole.checkpoint, parts.checkpoint)


@METHODS
def test_trained_tables_are_learned_and_kept(tmp_path: Path, method: Method) -> None:
    changes = {"method": method, "mask_token_id": mask_of(method), "train_embeddings": True, "train_lm_head": True}
    part = run(tiny_config(tmp_path, output="parts", max_tokens=150, **changes))
    whole = run(tiny_config(tmp_path, output="whole", max_tokens=300, **changes))
    parts = run(tiny_config(tmp_path, output="parts", max_tokens=300, **changes))
    assert part.checkpoint is not None
    assert whole.checkpoint is not None
    assert parts.checkpoint is not None
    assert_same_weights(whole.checkpoint, parts.checkpoint)
    frozen = run(tiny_config(tmp_path, output="frozen", max_tokens=150, **changes | {"train_embeddings": False}))
    assert frozen.checkpoint is not None
    shape = TargetShape(num_layers=4, hidden_size=32, vocab_size=VOCAB_SIZE)
    learned, fixed = (load_head(one, target=shape) for one in (whole.checkpoint, frozen.checkpoint))
    assert torch.equal(learned.embed_tokens.weight, trained_weights(whole.checkpoint)["embed_tokens.weight"])
    assert not torch.equal(learned.embed_tokens.weight, fixed.embed_tokens.weight)


def test_what_a_run_learns_does_not_depend_on_a_cache_of_another_type(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run(tiny_config(tmp_path, output="narrow", max_tokens=40, compute_dtype="bfloat16", cache_dir=cache))
    with_cache = run(tiny_config(tmp_path, output="a", max_tokens=100, cache_dir=cache))
    without = run(tiny_config(tmp_path, output="b", max_tokens=100))
    assert with_cache.checkpoint is not None
    assert without.checkpoint is not None
    assert_same_weights(with_cache.checkpoint, without.checkpoint)


def test_a_killed_run_loses_no_more_than_an_interval(tmp_path: Path) -> None:
    changes = {"max_tokens": 1500, "checkpoint_interval": 5, "cache_dir": tmp_path / "cache"}
    killed = tiny_config(tmp_path, output="killed", **changes)
    process = subprocess.Popen(
        [sys.executable, "-m", "peagle.training", *command_line(killed)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while len(checkpoints_in(killed.output)) < 2:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    reached = max(one["step"] for one in read_metrics(killed.output / "metrics.jsonl"))
    saved = int(checkpoints_in(killed.output)[-1].name.removeprefix("step-"))
    assert reached - saved <= 5
    resumed = run(killed)
    assert resumed.progress.step > reached
    whole = run(tiny_config(tmp_path, output="whole", **changes))
    assert whole.checkpoint is not None
    assert resumed.checkpoint is not None
    assert_same_weights(whole.checkpoint, resumed.checkpoint)
    steps = [one["step"] for one in read_metrics(killed.output / "metrics.jsonl") if "loss" in one]
    assert steps == list(range(1, whole.progress.step + 1))  # what was done twice is logged once


@METHODS
def test_a_run_starts_from_another_ones_head(tmp_path: Path, method: Method) -> None:
    changes = {"method": method, "mask_token_id": mask_of(method), "draft_vocab_size": 12}
    first = run(tiny_config(tmp_path, output="first", **changes))
    assert first.checkpoint is not None
    (tmp_path / "data.jsonl").unlink()
    questions = [record(number)["messages"][0] for number in range(20, 40)]
    answers = [{"role": "assistant", "content": f"quick jumps {number}, the"} for number in range(20)]
    pairs = zip(questions, answers, strict=True)
    write_data(tmp_path / "data.jsonl", [record(1, messages=[*pair]) for pair in pairs])
    more = tiny_config(tmp_path, output="more", start_from=tmp_path / "first", learning_rate=1e-30, **changes)
    second = run(more)
    assert second.checkpoint is not None
    before, after = trained_weights(first.checkpoint), trained_weights(second.checkpoint)
    names = [name for name in before if not name[0].isdigit()]
    assert all(torch.equal(before[name], after[name]) for name in names)  # at a rate of nothing it stays
    assert (first.checkpoint / "config.json").read_text() == (second.checkpoint / "config.json").read_text()
    shape = TargetShape(num_layers=4, hidden_size=32, vocab_size=VOCAB_SIZE)
    heads = [load_head(one, target=shape) for one in (first.checkpoint, second.checkpoint)]
    assert torch.equal(heads[0].draft_to_target_offsets, heads[1].draft_to_target_offsets)
    assert torch.equal(heads[0].lm_head.weight, heads[1].lm_head.weight)
    # Without it, the same data would give another draft vocabulary: the run must not go on as if nothing were.
    with pytest.raises(ConfigError, match="another draft vocabulary"):
        run(tiny_config(tmp_path, output="more", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 2}, "num_hidden_layers 1, this run's head would have 2; set --layers"),
        ({"draft_vocab_size": 90}, "--draft-vocab-size"),
        ({"taps": (0, 2, 3)}, "--taps"),
        ({"norm_taps": (1,)}, "--norm-taps"),
        ({"mask_token_id": 254}, "--mask-token-id"),
        ({"method": "eagle3", "mask_token_id": None}, "needs --method peagle"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    run(tiny_config(tmp_path, output="first", max_tokens=30))
    with pytest.raises(ConfigError, match=message):
        run(tiny_config(tmp_path, output="more", start_from=tmp_path / "first", **changes))


def test_starting_from_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint to start from"):
        run(tiny_config(tmp_path, start_from=tmp_path / "nowhere"))


def test_each_epoch_has_every_conversation_in_another_order() -> None:
    examples = [random_conversation(8, seed=number).example for number in range(9)]
    epochs = [[example_at(examples, 9 * epoch + i, seed=3).key for i in range(9)] for epoch in range(3)]
    keys = sorted(one.key for one in examples)
    assert all(sorted(epoch) == keys for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
