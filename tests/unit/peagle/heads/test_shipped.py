"""Heads that ship with the package are found by name and by the checkpoint they were trained for, by nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.engine.speculation_loader import choose_spec
from peagle.heads.shipped import ShippedHead, expected_survivals, head_for, shipped_heads
from peagle.spec_config import SpecConfig

RECEIPT = {"package": "some-model", "version": "1.0", "conversion": 1}


@pytest.fixture
def heads(tmp_path: Path) -> tuple[ShippedHead, ...]:
    for name, receipt in (("other", RECEIPT | {"version": "2.0"}), ("ours", RECEIPT)):
        (tmp_path / "heads" / name).mkdir(parents=True)
        (tmp_path / "heads" / name / "card.json").write_text(json.dumps({"target": receipt, "recipe": "long"}))
    (tmp_path / "heads" / "no-card").mkdir()
    return shipped_heads(tmp_path / "heads")


def checkpoint(directory: Path, receipt: str) -> Path:
    directory.mkdir()
    (directory / "source.json").write_text(receipt)
    return directory


def test_heads_have_the_names_of_their_directories(heads: tuple[ShippedHead, ...], tmp_path: Path) -> None:
    assert [(head.name, head.directory) for head in heads] == [
        (name, tmp_path / "heads" / name) for name in ("other", "ours")
    ]


def test_a_checkpoint_gets_the_head_that_was_trained_for_it(heads: tuple[ShippedHead, ...], tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", json.dumps(RECEIPT))
    assert head_for(directory, heads) == heads[1]
    assert choose_spec(SpecConfig(), directory, heads) == SpecConfig(model=str(heads[1].directory))


@pytest.mark.parametrize("receipt", [json.dumps(RECEIPT | {"version": "1.1"}), "{}", "no json", "[]"])
def test_other_checkpoints_get_none(heads: tuple[ShippedHead, ...], tmp_path: Path, receipt: str) -> None:
    directory = checkpoint(tmp_path / "model", receipt)
    assert head_for(directory, heads) is None
    assert choose_spec(SpecConfig(), directory, heads) == SpecConfig()


def test_a_checkpoint_without_a_receipt_gets_none(heads: tuple[ShippedHead, ...], tmp_path: Path) -> None:
    assert head_for(tmp_path, heads) is None


@pytest.mark.parametrize(
    "spec", [SpecConfig(num_speculative_tokens=0), SpecConfig(model="mine"), SpecConfig(method="suffix")], ids=str
)
def test_what_was_said_holds(heads: tuple[ShippedHead, ...], tmp_path: Path, spec: SpecConfig) -> None:
    assert choose_spec(spec, checkpoint(tmp_path / "model", json.dumps(RECEIPT)), heads) == spec


def test_a_card_says_what_to_expect(tmp_path: Path) -> None:
    assert expected_survivals(tmp_path) == ()
    (tmp_path / "card.json").write_text('{"acceptance": [0.5, 0.4]}')
    assert expected_survivals(tmp_path) == (0.5, 0.2)
    for text in ("{}", "no json", '{"acceptance": [null]}', "[]"):
        (tmp_path / "card.json").write_text(text)
        assert expected_survivals(tmp_path) == ()


def test_the_head_of_the_default_model_ships() -> None:
    (head,) = shipped_heads()
    assert head.name == "smollm2-135m-instruct"
    assert (head.directory / "model.safetensors").stat().st_size < 25_000_000
    assert 1.0 < 1 + sum(expected_survivals(head.directory)) < 3.0
