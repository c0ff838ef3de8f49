"""The nested config.json, in flat keys: what is filled in, taken along, and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peagle.drafter.head_files import HeadFiles
from peagle.drafter.loader import load_head, read_head_config
from peagle.drafter.speculators_layout import flatten
from peagle.errors import ModelLoadError
from tests.builders.published_heads import TARGET, speculators_eagle3, speculators_peagle


def flat(**changes: Any) -> dict[str, Any]:
    return flatten(speculators_peagle().config | changes)


@pytest.mark.parametrize(
    ("model_type", "vocab_size", "intermediate_size", "head_dim"),
    [("llama", 32000, 11008, 8), ("qwen3", 151936, 22016, 128)],
)
def test_keys_with_their_librarys_default_may_be_left_out(
    model_type: str, vocab_size: int, intermediate_size: int, head_dim: int, tmp_path: Path
) -> None:
    published = speculators_eagle3()
    left_out = ("vocab_size", "intermediate_size", "head_dim")
    layer = {key: value for key, value in published.config["transformer_layer_config"].items() if key not in left_out}
    changed = {"transformer_layer_config": layer | {"model_type": model_type}}
    replace(published, config=published.config | changed).write(tmp_path)
    config = read_head_config(tmp_path, replace(TARGET, vocab_size=vocab_size))
    assert (config.intermediate_size, config.head_dim) == (intermediate_size, head_dim)


def test_a_feature_that_is_one_hidden_state(tmp_path: Path) -> None:
    for key in ({"use_aux_hidden_state": False}, {"eagle_config": {"use_aux_hidden_state": False}}):
        directory = tmp_path / next(iter(key))
        published = speculators_eagle3()
        tensors = {name: tensor for name, tensor in published.tensors.items() if name != "fc.weight"}
        replace(published, config=published.config | key, tensors=tensors).write(directory)
        assert read_head_config(directory, TARGET).reads_last_hidden


def test_only_a_parallel_head_has_a_mask_token() -> None:
    assert flat()["mask_token_id"] == 299
    assert "mask_token_id" not in flat(speculators_model_type="eagle3")


@pytest.mark.parametrize(
    ("proposals", "expected"),
    [
        ({"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}, 3),
        ({"proposal_methods": []}, None),
        ({}, None),
        (None, None),
    ],
)
def test_number_of_drafts_without_a_default_method(proposals: Any, expected: int | None) -> None:
    assert flat(speculators_config=proposals)["num_speculative_tokens"] == expected


def test_tensors_of_training_are_skipped(tmp_path: Path) -> None:
    published = speculators_peagle()
    extra = {"verifier_lm_head.weight": torch.zeros(300, 32), "verifier_norm.weight": torch.zeros(32)}
    replace(published, tensors=published.tensors | extra).write(tmp_path)
    assert "verifier_norm.weight" not in load_head(tmp_path, target=TARGET).state_dict()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' are not served"),
        ({"speculators_model_type": None}, "speculators_model_type None are not served"),
        ({"transformer_layer_config": None}, "transformer_layer_config must be an object"),
        ({"mask_token_id": None}, "needs mask_token_id"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        flat(**changes)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_heads_are_refused(key: str, tmp_path: Path) -> None:
    published = speculators_peagle()
    replace(published, config=published.config | {key: {"quant_method": "fp8"}}).write(tmp_path)
    with pytest.raises(ModelLoadError, match=f"sets {key}, which is not served"):
        read_head_config(tmp_path, TARGET)


def test_errors_name_the_tensors_of_the_file(tmp_path: Path) -> None:
    published = speculators_eagle3()
    wrong = {"layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)}
    save_file(published.tensors | wrong, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    assert HeadFiles(tmp_path).file_name("layers.0.mlp.gone") == "layers.0.mlp.gone"
    with pytest.raises(
        ModelLoadError, match=r"layers\.0\.self_attn\.q_proj\.weight has the shape \[32, 32\], .* asks for \[32, 64\]"
    ):
        load_head(tmp_path, target=TARGET)
