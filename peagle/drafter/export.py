"""Writes a head as a published one: config.json and model.safetensors, flat layout, readable by `load_head` and vLLM.

Owns writing. Refuses heads whose linears were packed: their weights are gone.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.drafter.flat_layout import to_file_name
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig


def save_flat(head: DraftHead, directory: Path | str, *, leave_out: Collection[str] = ()) -> Path:
    """Write a head, in the float type it has; returns the directory, which is made if needed.

    Args:
        head: not packed.
        directory: where to.
        leave_out: file names of tensors that whoever loads the head takes from the target: `embed_tokens.weight`,
            `lm_head.weight`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {to_file_name(name): tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    for name in leave_out:
        del tensors[name]
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    tensors["t2d"] = _target_to_draft(tensors["d2t"], head.config.vocab_size)
    text = json.dumps(_config_values(head), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod((directory / "config.json").stat().st_mode)  # safetensors lets only the owner read
    return directory


def _target_to_draft(offsets: Tensor, vocab_size: int) -> Tensor:
    """Which target ids the head can propose, [V] bool."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[torch.arange(len(offsets)) + offsets] = True
    return mask


def _config_values(head: DraftHead) -> dict[str, Any]:
    config: HeadConfig = head.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        **({"ptd_token_id": config.mask_token_id} if config.is_parallel else {}),
        **({"num_speculative_tokens": config.num_speculative_tokens} if config.num_speculative_tokens else {}),
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "norm_before_residual": config.norm_before_residual,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "logit_scale": config.logit_scale,
        "fc_norm": list(config.fc_norm_taps),
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "eagle_config": {"use_aux_hidden_state": True},
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
