from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peagle.drafter.config_keys import parse_head_config
from peagle.drafter.head_config import HeadConfig, TargetShape
from peagle.errors import ModelLoadError
from tests.builders.head import TINY_TARGET, head_config_values

TARGET = TargetShape(num_layers=4, hidden_size=32, vocab_size=300)

NAMES = frozenset({"fc.weight", "norm.weight", "layers.0.hidden_norm.weight"})


def parse(values: dict[str, Any], target: TargetShape) -> HeadConfig:
    return parse_head_config(values, target, NAMES)


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
    config = parse(values, TARGET)
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
    config = parse(values, TargetShape(num_layers=24, hidden_size=32, vocab_size=300))
    assert config.aux_layer_ids == (2, 12, 21)
    assert config.draft_vocab_size == 300
    assert config.head_dim == 8
    assert config.num_key_value_heads == 4
    assert config.rope_scaling is None


def test_taps_inside_eagle_config() -> None:
    values = values_without("eagle_aux_hidden_state_layer_ids")
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 3]}
    assert parse(values, TARGET).aux_layer_ids == (0, 3)


def test_newer_rope_parameters() -> None:
    values = values_without("rope_theta", "rope_scaling")
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1234.0}
    config = parse(values, TARGET)
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
    assert parse(values_without("ptd_token_id") | given, TARGET).mask_token_id == expected


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"ptd_token_id": 300}, "mask token id 300"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "this target's final norm is no plain RMSNorm"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"\[1, 2, 4\]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "2, N/2 and N-3"),
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layers of sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"vocab_size": 301}, "vocab_size is 301"),
        ({"target_hidden_size": 64}, "hidden size 64"),
        ({"draft_vocab_size": 400}, "draft_vocab_size 400"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a positive number, got 0"),
        ({"num_depths": "8"}, "num_depths must be a positive number, got '8'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive number, got 0"),
        ({"hidden_size": "32"}, "hidden_size must be"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_refused_by_name(overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        parse(head_config_values(TINY_TARGET, **overrides), TARGET)


def test_a_head_without_a_mask_token_is_not_parallel() -> None:
    assert parse(values_without() | {"ptd_token_id": 7}, TARGET).is_parallel
    config = parse(values_without("ptd_token_id"), TARGET)
    assert config.mask_token_id is None
    assert not config.is_parallel


@pytest.mark.parametrize(
    ("given", "taps"), [(None, ()), (False, ()), (True, (0, 1, 2)), ([0, 2], (0, 2)), ([], ())], ids=str
)
def test_taps_that_are_normed(given: Any, taps: tuple[int, ...]) -> None:
    assert parse(values_without() | {"fc_norm": given}, TARGET).fc_norm_taps == taps


@pytest.mark.parametrize("given", [3, [3], ["0"], "all"])
def test_taps_that_are_not_there_are_refused(given: Any) -> None:
    with pytest.raises(ModelLoadError, match="fc_norm must be true, false or a list of taps below 3"):
        parse(values_without() | {"fc_norm": given}, TARGET)


def test_a_head_on_the_last_hidden_state_needs_the_targets_width() -> None:
    target = replace(TARGET, hidden_size=64, final_norm_eps=1e-3)
    values = values_without() | {"use_aux_hidden_state": False}
    with pytest.raises(
        ModelLoadError, match="64 wide, there is no fc that could bring it to the head's hidden_size 32"
    ):
        parse(values | {"target_hidden_size": 64}, target)
    config = parse(values, replace(TARGET, final_norm_eps=1e-3))
    assert (config.aux_layer_ids, config.feature_size, config.target_norm_eps) == ((4,), 32, 1e-3)


def test_a_head_is_eagles_if_its_first_layer_has_no_norms() -> None:
    target = replace(TARGET, final_norm_eps=1e-3)
    names = {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"}
    config = parse_head_config(values_without("ptd_token_id"), target, names)
    assert config.merges_embedding
    assert config.fc_bias
    assert config.reads_last_hidden
    assert not parse(values_without("ptd_token_id"), target).merges_embedding
