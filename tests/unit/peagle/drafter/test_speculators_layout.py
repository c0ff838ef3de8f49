"""The nested configuration: what is refused, what is taken where it is silent, and that writing undoes reading."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.drafter.config_keys import parse_head_config
from peagle.drafter.speculators_layout import flatten, is_speculators, nest
from peagle.errors import ModelLoadError
from tests.builders.head import tiny_head
from tests.builders.published_heads import TARGET, speculators_eagle3, speculators_peagle


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculators_model_type": "dflash"}, "'dflash' are not served; peagle and eagle3 are"),
        ({"speculators_model_type": None}, "None are not served"),
        ({"transformer_layer_config": None}, "transformer_layer_config must be an object, got None"),
        ({"mask_token_id": None}, "a head of type peagle needs mask_token_id, and has none"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        flatten(speculators_peagle().config | changes)


@pytest.mark.parametrize(("kind", "expected"), [("peagle", False), ("eagle3", True)])
def test_a_silent_residual_is_that_of_the_kind(kind: str, expected: bool) -> None:
    config = (speculators_peagle if kind == "peagle" else speculators_eagle3)().config
    config.pop("norm_before_residual", None)
    assert flatten(config)["norm_before_residual"] is expected
    assert flatten(config | {"norm_before_residual": not expected})["norm_before_residual"] is not expected


@pytest.mark.parametrize("proposals", [{}, {"proposal_methods": []}, None])
def test_a_file_without_proposals_names_no_number(proposals: dict[str, Any] | None) -> None:
    assert flatten(speculators_peagle().config | {"speculators_config": proposals})["num_speculative_tokens"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask_token_id": None, "norm_output": True, "fc_norm_taps": (0, 1, 2), "norm_before_residual": True},
        {"norm_before_fc": True, "attention_bias": True, "rope_theta": 5e5, "logit_scale": 0.5},
    ],
)
def test_nesting_is_undone_by_flattening(fields: dict[str, Any]) -> None:
    config = tiny_head(num_speculative_tokens=5, **fields).config
    values = nest(config, dtype="float32", num_speculative_tokens=5, verifier="a/target")
    assert is_speculators(values)
    assert parse_head_config(flatten(values), TARGET, {"norm.weight"}) == config


def test_heads_that_normed_only_some_taps_have_no_place() -> None:
    with pytest.raises(ModelLoadError, match="only some taps normed; write the flat layout"):
        nest(tiny_head(fc_norm_taps=(0,)).config, dtype="float32", num_speculative_tokens=5, verifier=None)
