"""Tiny random P-EAGLE heads, in memory and as files with the published heads' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig
from peagle.drafter.merging_head import make_head

TINY_TARGET: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 300}


def head_config_values(target_config: dict[str, Any], *, num_layers: int = 2, **overrides: Any) -> dict[str, Any]:
    """A flat config.json for a target of this configuration (a dictionary with the keys of `TINY_TARGET`)."""
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": target_config["hidden_size"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_hidden_layers": num_layers,
        "vocab_size": target_config["vocab_size"],
        "draft_vocab_size": target_config["vocab_size"],
        "ptd_token_id": target_config["vocab_size"] - 1,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2, target_config["num_hidden_layers"] - 1],
    }
    return values | overrides


def head_tensors(values: dict[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under the published names, for a config.json with these values."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    hidden, inner = values["hidden_size"], values["intermediate_size"]
    query = values["num_attention_heads"] * values["head_dim"]
    kv = values["num_key_value_heads"] * values["head_dim"]
    feature = len(values["eagle_aux_hidden_state_layer_ids"]) * values.get("target_hidden_size", hidden)
    num_draft, num_vocab = values["draft_vocab_size"], values["vocab_size"]
    draft_ids = torch.randperm(num_vocab, generator=generator)[:num_draft].sort().values
    tensors = {
        "embed_tokens.weight": random(num_vocab, hidden),
        "fc.weight": random(hidden, feature),
        "mask_hidden": random(1, 1, feature),
        "norm.weight": 1 + random(hidden),
        "lm_head.weight": random(num_draft, hidden),
        "d2t": draft_ids - torch.arange(num_draft),
        "t2d": torch.zeros(num_vocab, dtype=torch.bool).index_fill(0, draft_ids, True),
        "midlayer.hidden_norm.weight": 1 + random(hidden),
    }
    for layer in range(values["num_hidden_layers"]):
        prefix, width = ("midlayer", 2 * hidden) if layer == 0 else (f"layers.{layer}", hidden)
        for name, size in (("q", query), ("k", kv), ("v", kv)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random(size, width)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random(hidden, query)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = random(inner, hidden)
        tensors[f"{prefix}.mlp.up_proj.weight"] = random(inner, hidden)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random(hidden, inner)
        tensors[f"{prefix}.input_layernorm.weight"] = 1 + random(hidden)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = 1 + random(hidden)
    return tensors


def write_tiny_head(
    directory: Path, target_config: dict[str, Any], *, seed: int = 0, num_layers: int = 2, **overrides: Any
) -> Path:
    """Write a random head for a target; returns the directory.

    Args:
        directory: made if needed.
        target_config: a dictionary with the keys of `TINY_TARGET`, such as a model's config.json.
        seed: of the weights.
        num_layers: of the head.
        overrides: of config.json.
    """
    values = head_config_values(target_config, num_layers=num_layers, **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    save_file(head_tensors(values, seed=seed), directory / "model.safetensors")
    return directory


def tiny_head(*, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> DraftHead:
    """A random head in memory.

    Args:
        seed: of the weights.
        dtype: float type.
        overrides: fields of `HeadConfig`.
    """
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "target_hidden_size": 32,
        "aux_layer_ids": (1, 2, 3),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 300,
        "draft_vocab_size": 300,
        "mask_token_id": 299,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(seed)
    head = make_head(HeadConfig(**(fields | overrides))).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=dtype) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    return head.requires_grad_(False)
