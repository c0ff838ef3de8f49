"""Heads in every published layout load, and draft what their formulas say."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle.drafter.export import save_flat, save_speculators
from peagle.drafter.head import DraftHead
from peagle.drafter.loader import SharedWeights, load_head, missing_tables, read_head_config
from peagle.drafter.reference import reference_drafts, reference_drafts_in_turn
from peagle.errors import ModelLoadError
from tests.builders.head import tiny_head
from tests.builders.published_heads import (
    LAYOUTS,
    TARGET,
    PublishedHead,
    last_hidden_eagle3,
    plain_eagle3,
    shared_weights,
    speculators_eagle3,
    speculators_peagle,
)

TOKENS = [3, 1, 4, 1, 5, 9, 2]
NUM_DRAFTS = 3
TOLERANCE = 1e-4  # angles are computed in float32, whatever the head's float type is
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LAYOUTS),
    ("flat peagle", {"norm_before_residual": True, "rope_theta": 777.0}),
    ("flat peagle", {"attention_bias": True, "mlp_bias": True, "logit_scale": 0.5}),
    ("plain eagle3", {"norm_before_fc": True}),
    ("plain eagle3", {"norm_before_residual": True, "rope_theta": 777.0}),
    ("speculators peagle", {"fc_norm": True}),
    ("speculators peagle", {"model_type": "qwen3", "norm_before_fc": True}),
    ("speculators eagle3", {"fc_norm": True, "norm_output": True}),
    ("speculators eagle3", {"norm_before_residual": False}),
    ("last hidden eagle3", {"norm_before_residual": True, "norm_output": True}),
]
each_variant = pytest.mark.parametrize(("layout", "overrides"), VARIANTS, ids=str)


def load(directory: Path, **changes: Any) -> DraftHead:
    return load_head(directory, target=TARGET, shared=replace(shared_weights(), **changes), dtype=torch.float64)


def random_features(head: DraftHead) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(len(TOKENS) - 1, head.config.feature_size, generator=generator, dtype=torch.float64)


def drafted(head: DraftHead) -> Tensor:
    draft = reference_drafts if head.is_parallel else reference_drafts_in_turn
    return draft(head, TOKENS, random_features(head), NUM_DRAFTS).logits


def by_formulas(published: PublishedHead, head: DraftHead) -> Tensor:
    naive = published.naive()
    draft = naive.parallel_logits if published.is_parallel else naive.logits_in_turn
    return draft(TOKENS, random_features(head), NUM_DRAFTS)


@each_variant
def test_a_published_head_drafts_what_its_formulas_say(tmp_path: Path, layout: str, overrides: dict[str, Any]) -> None:
    published = LAYOUTS[layout](**overrides)
    head = load(published.write(tmp_path))
    assert head.is_parallel == published.is_parallel
    expected = by_formulas(published, head)
    assert expected.std() > 0.1
    assert (drafted(head) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("make", [speculators_peagle, speculators_eagle3])
def test_where_the_nested_file_is_silent_about_the_residual(tmp_path: Path, make: Callable[..., PublishedHead]) -> None:
    """Without the norm for P-EAGLE, with it for EAGLE-3: what vLLM takes, and heads were trained with."""
    published = make()
    published.config.pop("norm_before_residual", None)
    head = load(published.write(tmp_path))
    assert head.config.norm_before_residual == (make is speculators_eagle3)
    assert (drafted(head) - by_formulas(published, head)).abs().max() < TOLERANCE


@each_variant
def test_a_head_survives_being_written_and_read(tmp_path: Path, layout: str, overrides: dict[str, Any]) -> None:
    head = load(LAYOUTS[layout](**overrides).write(tmp_path / "published"))
    again = load(save_flat(head, tmp_path / "flat"))
    assert again.config == head.config
    assert torch.equal(drafted(again), drafted(head))
    if head.config.reads_last_hidden:
        with pytest.raises(ModelLoadError, match="the speculators layout has no place for heads on one hidden state"):
            save_speculators(head, tmp_path / "nested")
        return
    nested = save_speculators(head, tmp_path / "nested", num_speculative_tokens=7)
    again = load(nested)
    assert again.config == replace(head.config, num_speculative_tokens=7)
    assert torch.equal(drafted(again), drafted(head))
    assert "layers.0.self_attn.q_proj.weight" in load_file(nested / "model.safetensors")
    assert len({path.stat().st_mode for path in nested.iterdir()}) == 1


@pytest.mark.parametrize("save", [save_flat, save_speculators])
@pytest.mark.parametrize("mask_token_id", [7, None])
def test_left_out_tables_come_back_from_the_target(
    tmp_path: Path, save: Callable[..., Path], mask_token_id: int | None
) -> None:
    head = tiny_head(draft_vocab_size=50, mask_token_id=mask_token_id)
    head.draft_to_target_offsets.copy_(torch.arange(50) * 4)
    table = torch.full((300, 32), 9.0, dtype=torch.float64)
    table[torch.arange(50) * 5] = head.lm_head.weight
    shared = SharedWeights(embed_tokens=head.embed_tokens.weight, lm_head=table)
    directory = save(head, tmp_path, leave_out={"embed_tokens.weight", "lm_head.weight"})
    assert missing_tables(directory) == {"embed_tokens.weight", "lm_head.weight"}
    again = load_head(directory, target=TARGET, shared=shared, dtype=torch.float64)
    assert torch.equal(drafted(again), drafted(head))


def test_an_own_table_is_never_replaced_by_the_targets(tmp_path: Path) -> None:
    """A P-EAGLE head has trained the row of its mask token."""
    published = LAYOUTS["flat peagle"]()
    head = load(published.write(tmp_path))
    assert torch.equal(head.embed_tokens.weight, published.tensors["embed_tokens.weight"].double())
    assert missing_tables(tmp_path) == set()


def test_positions_past_the_declared_ones_are_served(tmp_path: Path) -> None:
    """EAGLE-3 heads declare 2,048 positions and are used far beyond: there is no table that could end."""
    short = load(plain_eagle3(max_position_embeddings=4).write(tmp_path / "short"))
    long = load(plain_eagle3(max_position_embeddings=4096).write(tmp_path / "long"))
    assert torch.equal(drafted(short), drafted(long))


def test_proposed_tokens_and_mask_come_from_the_nested_file(tmp_path: Path) -> None:
    peagle = speculators_peagle()
    proposals = peagle.config["speculators_config"]["proposal_methods"]
    proposals.insert(0, {"proposal_type": "sampled", "speculative_tokens": 9})
    config = read_head_config(peagle.write(tmp_path / "peagle"), TARGET)
    assert (config.num_speculative_tokens, config.mask_token_id) == (6, 299)
    eagle3 = speculators_eagle3()
    eagle3.config["mask_token_id"] = None
    config = read_head_config(eagle3.write(tmp_path / "eagle3"), TARGET)
    assert (config.num_speculative_tokens, config.is_parallel) == (6, False)


def test_the_last_hidden_state_needs_a_target_with_a_plain_norm(tmp_path: Path) -> None:
    directory = last_hidden_eagle3().write(tmp_path)
    with pytest.raises(ModelLoadError, match="final norm is no plain RMSNorm"):
        load_head(directory, target=replace(TARGET, final_norm_eps=None))
    with pytest.raises(ModelLoadError, match="behind the final norm, whose weight was not found"):
        load(directory, final_norm=None)


@pytest.mark.parametrize(
    ("layout", "name", "wanted"),
    [
        ("flat peagle", "layers.1.mlp.down_proj.weight", [32, 48]),
        ("flat peagle", "d2t", [300]),
        ("plain eagle3", "midlayer.self_attn.k_proj.weight", [16, 64]),
        ("speculators eagle3", "layers.0.self_attn.q_proj.weight", [32, 64]),
        ("last hidden eagle3", "midlayer.hidden_norm.weight", [32]),
        ("merging eagle", "layers.0.mlp.up_proj.weight", [48, 32]),
    ],
)
def test_a_wrong_shape_is_named_as_the_files_name_it(tmp_path: Path, layout: str, name: str, wanted: list[int]) -> None:
    published = LAYOUTS[layout]()
    published.tensors[name] = torch.zeros(3, dtype=published.tensors[name].dtype)
    message = f"{name} has the shape [3], but config.json asks for {wanted}"
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load(published.write(tmp_path))
