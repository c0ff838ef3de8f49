"""Which drafter a configuration and a head's files make together, and which of them contradict each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.drafter.peagle import kv_geometry
from peagle.engine.drafter_loader import DrafterPlan, plan_drafter
from peagle.errors import ConfigError, ModelLoadError
from peagle.models.loader import choose_device, choose_precision, read_model_config
from peagle.spec_config import SpecConfig
from tests.builders.engine import engine_config
from tests.builders.published_heads import (
    LAYOUTS,
    PublishedHead,
    flat_peagle,
    last_hidden_eagle3,
    merging_eagle,
    plain_eagle3,
    speculators_eagle3,
    speculators_peagle,
)

TARGET = SimpleNamespace(num_hidden_layers=4, hidden_size=32, vocab_size=300, rms_norm_eps=1e-3, model_type="llama")


def plan(directory: Path, published: PublishedHead, **spec: Any) -> DrafterPlan:
    return plan_drafter(SpecConfig.from_mapping({"model": str(published.write(directory)), **spec}), TARGET)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_heads_file_decides_how_it_drafts(tmp_path: Path, name: str) -> None:
    published = LAYOUTS[name]()
    found = plan(tmp_path, published)
    assert found.head_config is not None
    assert found.head_config.is_parallel == published.is_parallel
    method = "eagle" if name == "merging eagle" else "eagle3"
    assert plan(tmp_path, published, method=method) == found


@pytest.mark.parametrize("make", [flat_peagle, speculators_peagle])
def test_a_command_line_of_a_published_card(tmp_path: Path, make: Callable[[], PublishedHead]) -> None:
    found = plan(tmp_path, make(), method="eagle3", num_speculative_tokens=5, parallel_drafting=True)
    assert found.num_speculative_tokens == 5


@pytest.mark.parametrize("make", [plain_eagle3, speculators_eagle3, last_hidden_eagle3, merging_eagle])
@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"parallel_drafting": True}, "parallel_drafting true"),
        ({"method": "peagle"}, "method peagle"),
        ({"parallel_drafting_spec": {"num_branches": 2, "depth": 2}}, "parallel_drafting_spec"),
    ],
)
def test_a_plain_head_does_not_draft_in_parallel(
    tmp_path: Path, make: Callable[[], PublishedHead], asked: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs a head that drafts in parallel; .* has no mask_hidden"):
        plan(tmp_path, make(), **asked)


def test_a_parallel_head_does_not_draft_in_turn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parallel_drafting is false, but the draft head was trained to"):
        plan(tmp_path, flat_peagle(), parallel_drafting=False)
    assert plan(tmp_path / "plain", plain_eagle3(), parallel_drafting=False).head_config is not None


def test_eagle_is_not_eagle3(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the draft head is of method eagle, not of method eagle3"):
        plan(tmp_path / "eagle", merging_eagle(), method="eagle3")
    with pytest.raises(ConfigError, match="the draft head is of method eagle3, not of method eagle"):
        plan(tmp_path / "eagle3", plain_eagle3(), method="eagle")


def test_where_the_number_of_drafts_comes_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert plan(tmp_path / "file", speculators_peagle()).num_speculative_tokens == 6
    assert "num_speculative_tokens: 6 (the draft head's config.json)" in caplog.text
    assert plan(tmp_path / "none", plain_eagle3()).num_speculative_tokens == 4
    assert "num_speculative_tokens: 4 (the default" in caplog.text
    assert plan(tmp_path / "nemo", flat_peagle(num_depths=3)).num_speculative_tokens == 3
    assert plan(tmp_path / "file", speculators_peagle(), num_speculative_tokens=2).num_speculative_tokens == 2
    with pytest.raises(ModelLoadError, match="asks for 40 drafts, and at most 32"):
        plan(tmp_path / "many", flat_peagle(num_speculative_tokens=40))


def test_a_gemma_target_has_no_plain_final_norm(tmp_path: Path) -> None:
    spec = SpecConfig(model=str(last_hidden_eagle3().write(tmp_path)))
    with pytest.raises(ModelLoadError, match="no plain RMSNorm"):
        plan_drafter(spec, SimpleNamespace(**(vars(TARGET) | {"model_type": "gemma3_text"})))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_beside_a_target(checkpoint: Path, tmp_path: Path, name: str) -> None:
    config = read_model_config(checkpoint)
    spec = SpecConfig(model=str(LAYOUTS[name]().write(tmp_path)))
    model = engine_config(checkpoint).model
    precision = choose_precision(model, config.dtype, choose_device(model))
    head = plan_drafter(spec, config).load_head(checkpoint, precision)
    assert head is not None
    assert head.dtype == precision.compute_dtype
    assert kv_geometry(head, block_size=4).dtype == head.dtype, "whatever type the target's cache has"
