from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peagle.drafter.head_config import TargetShape, parse_head_config, read_head_config
from peagle.errors import ModelLoadError
from tests.builders.head import TINY_TARGET, head_config_values

TARGET = TargetShape(num_layers=4, hidden_size=32, vocab_size=300)


def values_without(*keys: str, **overrides: Any) -> dict[str, Any]:
    values = head_config_values(TINY_TARGET, **overrides)
    return {key: value for key, value in values.items() if key not in keys}


def test_published_keys() -> None:
    values = head_config_values(
        TINY_TARGET,
        num_layers=4,
        draft_vocab_size=100,
        ptd_token_id=17,
        rope_theta=5e5,
        rope_scaling={"rope_type": "llama3", "factor": 8.0},
        attention_bias=True,
    )
    config = parse_head_config(values, TARGET)
    assert config.num_hidden_layers == 4
    assert config.draft_vocab_size == 100
    assert config.mask_token_id == 17
    assert config.rope_theta == 5e5
    assert config.rope_scaling == {"rope_type": "llama3", "factor": 8.0}
    assert config.aux_layer_ids == (1, 2, 3)
    assert config.feature_size == 96
    assert config.attention_bias
    assert not config.norm_before_residual


def test_defaults_of_absent_keys() -> None:
    values = values_without(
        "eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "head_dim", "num_key_value_heads", "rope_scaling"
    )
    config = parse_head_config(values, TargetShape(num_layers=24, hidden_size=32, vocab_size=300))
    assert config.aux_layer_ids == (2, 12, 21)
    assert config.draft_vocab_size == 300
    assert config.head_dim == 8
    assert config.num_key_value_heads == 4
    assert config.rope_scaling is None


def test_taps_inside_eagle_config() -> None:
    values = values_without("eagle_aux_hidden_state_layer_ids")
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 3]}
    assert parse_head_config(values, TARGET).aux_layer_ids == (0, 3)


def test_newer_rope_parameters() -> None:
    values = values_without("rope_theta", "rope_scaling")
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1234.0}
    config = parse_head_config(values, TARGET)
    assert config.rope_theta == 1234.0
    assert config.rope_scaling == {"rope_type": "default"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ptd_token_id": 1}, 1),
        ({"ptd_token_id": 1, "pard_token": 2}, 2),
        ({"pard_token": 2, "dspark_noise_token_id": 3}, 3),
        ({"dspark_noise_token_id": 3, "mask_token_id": 4}, 4),
        ({"mask_token_id": None, "ptd_token_id": 1}, 1),
        ({"mask_token_id": 4, "dflash_config": {"mask_token_id": 0}}, 0),
    ],
)
def test_order_of_mask_ids(given: dict[str, Any], expected: int) -> None:
    assert parse_head_config(values_without("ptd_token_id") | given, TARGET).mask_token_id == expected


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"ptd_token_id": 300}, "mask token id 300"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"\[1, 2, 4\]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "2, N/2 and N-3"),
        ({"speculators_model_type": "peagle"}, "speculators layout"),
        ({"model_type": "qwen3"}, "'qwen3'"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"vocab_size": 301}, "vocab_size is 301"),
        ({"target_hidden_size": 64}, "hidden size 64"),
        ({"draft_vocab_size": 400}, "draft_vocab_size 400"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive number, got 0"),
        ({"hidden_size": "32"}, "hidden_size must be"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_refused_by_name(overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        parse_head_config(head_config_values(TINY_TARGET, **overrides), TARGET)


@pytest.mark.parametrize(("text", "reason"), [(None, "is missing"), ("{", "cannot read"), ("[]", "JSON object")])
def test_broken_file(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=reason):
        read_head_config(tmp_path / "config.json", TARGET)


def test_a_head_without_a_mask_token_is_not_parallel() -> None:
    assert parse_head_config(values_without() | {"ptd_token_id": 7}, TARGET).is_parallel
    config = parse_head_config(values_without("ptd_token_id"), TARGET)
    assert config.mask_token_id is None
    assert not config.is_parallel


@pytest.mark.parametrize(
    ("given", "taps"), [(None, ()), (False, ()), (True, (0, 1, 2)), ([0, 2], (0, 2)), ([], ())], ids=str
)
def test_taps_that_are_normed(given: Any, taps: tuple[int, ...]) -> None:
    assert parse_head_config(values_without() | {"fc_norm": given}, TARGET).fc_norm_taps == taps


@pytest.mark.parametrize("given", [3, [3], ["0"], "all"])
def test_taps_that_are_not_there_are_refused(given: Any) -> None:
    with pytest.raises(ModelLoadError, match="fc_norm must be true, false or a list of taps below 3"):
        parse_head_config(values_without() | {"fc_norm": given}, TARGET)
