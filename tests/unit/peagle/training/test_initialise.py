"""The head to begin with: a piece of its target, the same for the same seed, with the target's tables frozen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from peagle.drafter.head import DraftHead
from peagle.errors import ConfigError
from peagle.training.config import HeadOptions
from peagle.training.initialise import build_head, head_config, start_mask
from peagle.training.vocabulary import build_draft_vocabulary
from tests.builders.model import build_model

OPTIONS = HeadOptions(layers=2, draft_vocab_size=50, taps=(1, 2, 3))
VOCABULARY = build_draft_vocabulary(torch.arange(300), 50, always=(0,))


def build(*, seed: int = 0, family: str = "llama", **changes: Any) -> tuple[DraftHead, torch.nn.Module]:
    target = build_model(family, dtype=torch.float32)
    options = dataclasses.replace(OPTIONS, **changes)
    config = head_config(target, options, mask_token_id=7)
    return build_head(target, config, VOCABULARY, options=options, seed=seed), target


def test_tables_are_the_targets_own_and_frozen() -> None:
    head, target = build()
    chosen = VOCABULARY.target_ids
    assert torch.equal(head.embed_tokens.weight, target.get_input_embeddings().weight)  # type: ignore[operator]
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[chosen])  # type: ignore[operator]
    assert torch.equal(head.to_target_ids(torch.arange(50)), chosen)
    assert frozen_in(head) == {"embed_tokens.weight", "lm_head.weight"}


def test_either_table_can_be_trained() -> None:
    assert frozen_in(build(train_embeddings=True)[0]) == {"lm_head.weight"}
    assert frozen_in(build(train_lm_head=True)[0]) == {"embed_tokens.weight"}


def frozen_in(head: DraftHead) -> set[str]:
    return {name for name, parameter in head.named_parameters() if not parameter.requires_grad}


def test_layers_are_the_targets_last() -> None:
    head, target = build()
    theirs = dict(target.model.layers[-1].state_dict())  # type: ignore[union-attr, index]
    for name, tensor in head.layers[1].state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    first = dict(target.model.layers[-2].state_dict())  # type: ignore[union-attr, index]
    wide = head.layers[0].state_dict()["self_attn.q_proj.weight"]
    assert torch.equal(wide[:, 32:], first["self_attn.q_proj.weight"])  # the feature's half
    assert wide[:, :32].std() < 0.03  # the embedding's


def test_the_last_tap_comes_through() -> None:
    head, _ = build()
    features = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    fused, last = head.fuse(features), features[:, -32:]
    assert torch.cosine_similarity(fused, last).min() > 0.95


def test_a_seed_is_all_that_counts() -> None:
    states: list[dict[str, torch.Tensor]] = []
    for seed in (3, 3, 4):
        torch.randn(seed + len(states))  # what was drawn before does not matter
        states.append(build(seed=seed)[0].state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["fc.weight"], states[2]["fc.weight"])


def test_the_mask_starts_as_the_mean_feature() -> None:
    head, _ = build()
    features = [torch.randn(3, 96), torch.randn(5, 96)]
    start_mask(head, features)
    torch.testing.assert_close(head.mask_hidden.data, torch.cat(features).mean(0))


def test_other_layers_than_llamas_are_refused() -> None:
    with pytest.raises(ConfigError, match="set from_target to false"):
        build(family="qwen3")
    assert build(family="qwen3", from_target=False)[0].config.num_hidden_layers == 2
