"""Tiny random-weight checkpoints of every served family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SHARED: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True} | _EXPERTS,
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8} | _EXPERTS,
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
}


def build_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A random model of a family, with weights large enough that its logits differ clearly."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(_SHARED | FAMILIES[family] | overrides))
    # transformers' default product over experts takes no double
    extra = {"experts_implementation": "eager"} if "num_experts_per_tok" in FAMILIES[family] else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float64, **extra
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
            elif "norm" in name or "sinks" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def write_model(directory: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model as safetensors; returns the directory."""
    build_model(family, seed=seed, **overrides).save_pretrained(str(directory))
    return directory
