"""A head to begin with: the target's last layers, its tables, and a fusion that lets the last tap through.

A head that starts as a piece of its target has a language model's habits from the first step. The first layer is wider
than the target's; the half that reads the embedding starts near zero. Embeddings and lm_head are the target's own rows
and stay frozen, so that a head's file need not hold them, unless the options say otherwise. Owns the start. Refuses to
know how the head is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig
from peagle.errors import ConfigError
from peagle.training.config import HeadOptions
from peagle.training.vocabulary import DraftVocabulary

_EMBEDDING_STD = 0.02


def head_config(target: Any, options: HeadOptions, *, mask_token_id: int | None) -> HeadConfig:
    """A head with the geometry of the target's layers.

    Raises:
        ConfigError: it cannot be made for this target.
    """
    config = target.config
    num_layers = int(config.num_hidden_layers)
    taps = options.taps or (2, num_layers // 2, num_layers - 3)
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= num_layers:
        raise ConfigError(f"taps {list(taps)} must be ascending layers of the target, which has {num_layers}; set taps")
    if any(not 0 <= tap < len(taps) for tap in options.norm_taps):
        raise ConfigError(f"norm_taps {list(options.norm_taps)} must be places among the {len(taps)} taps")
    if options.layers > num_layers:
        raise ConfigError(f"layers is {options.layers}, but the target has only {num_layers}")
    if options.draft_vocab_size > config.vocab_size:
        raise ConfigError(
            f"draft_vocab_size {options.draft_vocab_size} is larger than the target's vocabulary, which has "
            f"{config.vocab_size} tokens"
        )
    rope = dict(getattr(config, "rope_parameters", None) or {})
    theta = float(rope.pop("rope_theta", 10000.0))
    return HeadConfig(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        aux_layer_ids=tuple(taps),
        num_hidden_layers=options.layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=options.draft_vocab_size,
        mask_token_id=mask_token_id,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=theta,
        rope_scaling=None if rope.get("rope_type", "default") == "default" else rope,
        rms_norm_eps=config.rms_norm_eps,
        hidden_act=config.hidden_act,
        fc_norm_taps=options.norm_taps,
    )


def build_head(
    target: Any, config: HeadConfig, vocabulary: DraftVocabulary, *, options: HeadOptions, seed: int
) -> DraftHead:
    """A head in float32 on the target's device; only what is to be trained requires a gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = DraftHead(config)
        _fill(head, target, vocabulary, from_target=options.from_target)
    head.embed_tokens.requires_grad_(options.train_embeddings)
    head.lm_head.requires_grad_(options.train_lm_head)
    return head.to(target.device)


@torch.no_grad()
def _fill(head: DraftHead, target: Any, vocabulary: DraftVocabulary, *, from_target: bool) -> None:
    head.draft_to_target_offsets.copy_(vocabulary.offsets)
    head.embed_tokens.weight.copy_(target.get_input_embeddings().weight.float())
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[vocabulary.target_ids].float())
    head.norm.weight.copy_(target.model.norm.weight.float())
    _let_last_tap_through(head)
    if from_target:
        _copy_layers(head, target.model.layers[-head.config.num_hidden_layers :])


def start_mask(head: DraftHead, features: Sequence[Tensor]) -> None:
    """Begin `mask_hidden` as the mean feature: a mask slot then looks like a slot, not like noise."""
    if not head.config.is_parallel:
        return
    with torch.no_grad():
        head.mask_hidden.copy_(torch.cat([one.float() for one in features]).mean(0))


def _let_last_tap_through(head: DraftHead) -> None:
    size = head.config.target_hidden_size
    nn.init.normal_(head.fc.weight, std=_EMBEDDING_STD / 2)
    if size == head.config.hidden_size:
        head.fc.weight[:, -size:].copy_(torch.eye(size))


def _copy_layers(head: DraftHead, layers: Sequence[Any]) -> None:
    for index, (own, theirs) in enumerate(zip(head.layers, layers, strict=True)):
        state = {name: tensor.float() for name, tensor in theirs.state_dict().items()}
        if index == 0:
            state["hidden_norm.weight"] = state["input_layernorm.weight"]
            state["input_layernorm.weight"] = torch.ones_like(state["input_layernorm.weight"])
            for name in ("q_proj", "k_proj", "v_proj"):
                key = f"self_attn.{name}.weight"
                embedding_half = torch.randn_like(state[key]) * _EMBEDDING_STD
                state[key] = torch.cat([embedding_half, state[key]], -1)
        try:
            own.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                "the target's layers are not Llama's, so a head cannot start from them; set from_target to false"
            ) from error
