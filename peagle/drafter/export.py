"""Writes a head as a published one: config.json and model.safetensors, readable by `load_head` and by other servers.

Owns writing, in the flat layout and in that of speculators. Refuses heads whose linears were packed: their weights are
gone.
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
from peagle.drafter.speculators_layout import nest

DEFAULT_NUM_SPECULATIVE_TOKENS = 4  # the speculators layout always names a number
_FIRST_LAYER = "layers.0."
_OF_TARGET = "target_norm.weight"


def save_flat(
    head: DraftHead,
    directory: Path | str,
    *,
    leave_out: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a head in the flat layout; returns the directory, which is made if needed.

    Args:
        head: not packed.
        directory: where to.
        leave_out: file names of tensors that whoever loads the head takes from the target: `embed_tokens.weight`,
            `lm_head.weight`. Other servers take the lm_head of a reduced vocabulary from the head only.
        dtype: float type of the files; None: the head's.
    """
    values = _flat_values(head.config, dtype=dtype or head.dtype)
    prefix = _FIRST_LAYER if head.config.merges_embedding else "midlayer."
    return _write(directory, values, _file_tensors(head, first_layer=prefix, leave_out=leave_out, dtype=dtype))


def save_speculators(
    head: DraftHead,
    directory: Path | str,
    *,
    num_speculative_tokens: int | None = None,
    verifier: str | None = None,
    leave_out: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a head in the speculators layout. See `save_flat`.

    Args:
        head: not packed.
        directory: where to.
        num_speculative_tokens: drafts that servers make by default; None: what the head was made for, or 4.
        verifier: name or path of the target, if the file is to name it.
        leave_out: as for `save_flat`.
        dtype: as for `save_flat`.

    Raises:
        ModelLoadError: the layout has no place for such a head.
    """
    values = nest(
        head.config,
        dtype=_dtype_name(dtype or head.dtype),
        num_speculative_tokens=num_speculative_tokens
        or head.config.num_speculative_tokens
        or DEFAULT_NUM_SPECULATIVE_TOKENS,
        verifier=verifier,
    )
    return _write(directory, values, _file_tensors(head, first_layer=_FIRST_LAYER, leave_out=leave_out, dtype=dtype))


def _file_tensors(
    head: DraftHead, *, first_layer: str, leave_out: Collection[str], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """A head's tensors by their published names."""
    tensors = {
        to_file_name(name, first_layer=first_layer): _for_file(tensor, dtype)
        for name, tensor in head.state_dict().items()
        if name != _OF_TARGET
    }
    for name in leave_out:
        del tensors[name]
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    tensors["t2d"] = _target_to_draft(tensors["d2t"], head.config.vocab_size)
    return tensors


def _for_file(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _write(directory: Path | str, values: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config_path, path = directory / "config.json", directory / "model.safetensors"
    config_path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(config_path.stat().st_mode)  # safetensors lets only the owner read
    return directory


def _target_to_draft(offsets: Tensor, vocab_size: int) -> Tensor:
    """Which target ids the head can propose, [V] bool."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[torch.arange(len(offsets)) + offsets] = True
    return mask


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flat_values(config: HeadConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM" if config.merges_embedding else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if config.qk_norm else "llama",
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
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "fc_norm": list(config.fc_norm_taps),
        **_feature_values(config),
        "torch_dtype": _dtype_name(dtype),
    }


def _feature_values(config: HeadConfig) -> dict[str, Any]:
    if config.reads_last_hidden:
        return {"eagle_config": {"use_aux_hidden_state": False}}
    return {
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "eagle_config": {"use_aux_hidden_state": True},
    }
