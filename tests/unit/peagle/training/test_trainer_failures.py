"""What goes wrong in a run: a clear error, early, and the last checkpoint is still there."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.errors import ConfigError
from peagle.training.checkpoint import CheckpointStore, Progress, RunIdentity, checkpoints_in
from peagle.training.trainer import run
from tests.builders.head import tiny_head
from tests.unit.peagle.training.tiny_run import record, tiny_config, write_data, write_target


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "is empty"),
        ([{"messages": [{"role": "user", "content": "hi"}]}], "no assistant turn"),
        (
            [record(1, messages=[*[{"role": "user", "content": "x" * 500}], *record(1)["messages"][1:]])],
            "longer than 128",
        ),
    ],
)
def test_data_without_a_lesson(tmp_path: Path, records: list[dict[str, Any]], message: str) -> None:
    write_data(tmp_path / "data.jsonl", records)
    with pytest.raises(ConfigError, match=message):
        run(tiny_config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": ord("s")}, "mask_token_id 115 occurs in the data"),
        ({"mask_token_id": None}, "every special token occurs in the data"),
        ({"draft_vocab_size": 5000}, "draft_vocab_size 5000 is larger than the target's vocabulary, which has 272"),
        ({"taps": None}, "set taps"),
        ({"norm_taps": (3,)}, "norm_taps"),
        ({"layers": 5}, "the target has only 4"),
        ({"keep_checkpoints": 10**12}, "free some space or lower keep_checkpoints"),
        ({"method": "eagle3", "mask_token_id": 255}, "eagle3 has no mask slots"),
        ({"method": "eagle3", "mask_token_id": None, "segments": 2}, "segments is for method peagle"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tiny_config(tmp_path, **changes))
    assert checkpoints_in(tmp_path / "run") == []


def test_a_conversation_beyond_the_targets_context(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", [record(number, num_words=600) for number in range(4)])
    with pytest.raises(ConfigError, match=r"the target reads 512: .* set max_length"):
        run(tiny_config(tmp_path, max_length=4096))
    assert run(tiny_config(tmp_path, max_length=512, max_tokens=40)).progress.step == 1


def test_a_loss_that_is_no_number_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    done = run(tiny_config(tmp_path, max_tokens=100))
    assert done.checkpoint is not None
    state = (done.checkpoint / "training.pt").read_bytes()
    with pytest.raises(ConfigError, match=r"not a number any more.*lower learning_rate"):
        run(tiny_config(tmp_path, max_tokens=1000, learning_rate=1e30, checkpoint_interval=50))
    assert checkpoints_in(tmp_path / "run")[-1] == done.checkpoint
    assert (done.checkpoint / "training.pt").read_bytes() == state
    assert run(tiny_config(tmp_path, max_tokens=200)).progress.step > done.progress.step


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    done = run(tiny_config(tmp_path, max_tokens=100))
    with pytest.raises(ConfigError, match="the last checkpoint is kept"):
        run(tiny_config(tmp_path, max_tokens=1000, learning_rate=1e39, checkpoint_interval=1))
    assert checkpoints_in(tmp_path / "run")[-1] == done.checkpoint


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "training.pt"])
def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, file: str) -> None:
    head = tiny_head(dtype=torch.float32).requires_grad_(True)
    optimiser = torch.optim.AdamW(head.parameters())
    store = CheckpointStore(tmp_path, identity(), keep=1)
    num_bytes = (store.save(head, optimiser, Progress(step=3)) / file).stat().st_size - 1
    with full_disk(num_bytes), pytest.raises(ConfigError, match=r"cannot write a checkpoint.*free some space"):
        store.save(head, optimiser, Progress(step=4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert store.restore(head, optimiser) == Progress(step=3)


def test_a_disk_that_is_full_for_anything_else_is_an_error_of_its_own(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with full_disk(100), pytest.raises(ConfigError, match=r"cannot write to .*free some space and start again"):
        run(config)


def test_another_target(tmp_path: Path) -> None:
    run(tiny_config(tmp_path, max_tokens=50))
    write_target(tmp_path / "target", seed=1)
    with pytest.raises(ConfigError, match="was made with another target"):
        run(tiny_config(tmp_path, max_tokens=100))
    with pytest.raises(ConfigError, match="trained for another target"):
        run(tiny_config(tmp_path, output="other", start_from=tmp_path / "run"))


def test_other_data_or_another_head(tmp_path: Path) -> None:
    run(tiny_config(tmp_path, max_tokens=50))
    with pytest.raises(ConfigError, match="was made with another head"):
        run(tiny_config(tmp_path, layers=2))
    write_data(tmp_path / "data.jsonl", [record(number) for number in range(3, 12)])
    with pytest.raises(ConfigError, match="was made with another data"):
        run(tiny_config(tmp_path))


@pytest.mark.parametrize("flag", ["train_embeddings", "train_lm_head"])
def test_other_weights_than_the_checkpoint_has(tmp_path: Path, flag: str) -> None:
    run(tiny_config(tmp_path, max_tokens=50))
    table = {"train_embeddings": "embed_tokens.weight", "train_lm_head": "lm_head.weight"}[flag]
    changes: dict[str, Any] = {flag: True}
    with pytest.raises(ConfigError, match=rf"differ in {table}: set train_embeddings and train_lm_head as they were"):
        run(tiny_config(tmp_path, max_tokens=100, **changes))


def test_a_broken_checkpoint_names_the_one_before(tmp_path: Path) -> None:
    done = run(tiny_config(tmp_path, max_tokens=100))
    assert done.checkpoint is not None
    state = done.checkpoint / "training.pt"
    for damage in (b"", b"junk", state.read_bytes()[:-1000]):
        state.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"remove step-.* to go on from the one before"):
            run(tiny_config(tmp_path))


def identity(head: str = "{'num_hidden_layers': 1, 'logit_scale': 1.0}") -> RunIdentity:
    return RunIdentity(target="t", method="peagle", data="d", head=head)


def test_a_field_that_a_head_did_not_have_yet_counts_as_its_default() -> None:
    ours = identity()
    theirs = {"target": "t", "method": "peagle", "data": "d"}
    assert ours.first_difference({**theirs, "head": "{'num_hidden_layers': 1}"}) is None
    assert ours.first_difference({**theirs, "head": "{'num_hidden_layers': 1, 'logit_scale': 2.0}"}) == "head"
    assert ours.first_difference({**theirs, "head": "{'num_hidden_layers': 2}"}) == "head"
    assert ours.first_difference({**theirs, "head": "no dictionary"}) == "head"
    assert ours.first_difference({}) == "target"
