"""The speculators layout: a nested config.json, and tensors whose first layer is `layers.0`.

The decoder layer's configuration is an object of its own, in which keys with their library's default may be missing;
the rest stands beside it, and how many tokens are drafted stands in the proposal methods. Owns the way between this and
flat keys. Refuses to know what the keys mean (`config_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peagle.drafter.head_config import HeadConfig
from peagle.errors import ModelLoadError

PARALLEL, IN_TURN = "peagle", "eagle3"

_LAYER = "transformer_layer_config"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
}
_BESIDE = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "logit_scale",
    "mask_token_id",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "quantization_config",
    "compression_config",
    "target_hidden_size",
    "use_aux_hidden_state",
    "eagle_config",
)


def is_speculators(values: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is in this layout."""
    return "speculators_model_type" in values or _LAYER in values


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flat keys of a nested config.json.

    Absent, `norm_before_residual` is true for eagle3, as vLLM reads it, and false for peagle, as it is trained.

    Raises:
        ModelLoadError: it describes another kind of head, or lacks a part.
    """
    kind = values.get("speculators_model_type")
    if kind not in (PARALLEL, IN_TURN):
        raise ModelLoadError(f"draft heads of speculators_model_type {kind!r} are not served; peagle and eagle3 are")
    layer = values.get(_LAYER)
    if not isinstance(layer, dict):
        raise ModelLoadError(f"draft head config.json: {_LAYER} must be an object, got {layer!r}")
    flat = _DEFAULTS.get(layer.get("model_type", "llama"), {}) | layer
    flat |= {"norm_before_residual": kind == IN_TURN}
    flat |= {key: values[key] for key in _BESIDE if values.get(key) is not None}
    flat["num_speculative_tokens"] = _num_speculative_tokens(values)
    if kind == IN_TURN:
        return {key: value for key, value in flat.items() if key != "mask_token_id"}
    if flat.get("mask_token_id") is None:
        raise ModelLoadError("draft head config.json: a head of type peagle needs mask_token_id, and has none")
    return flat


def _num_speculative_tokens(values: Mapping[str, Any]) -> int | None:
    """Of the default proposal method; of the first one if none is the default."""
    proposals = values.get("speculators_config") or {}
    methods = proposals.get("proposal_methods") or []
    default = proposals.get("default_proposal_method")
    chosen = [one for one in methods if one.get("proposal_type") == default] or methods
    return chosen[0].get("speculative_tokens") if chosen else None


def nest(config: HeadConfig, *, dtype: str, num_speculative_tokens: int, verifier: str | None) -> dict[str, Any]:
    """The nested config.json of a head; `flatten` undoes it.

    Args:
        config: of the head.
        dtype: name of its float type.
        num_speculative_tokens: drafts that servers make by default.
        verifier: name or path of the target, if it is to be named.

    Raises:
        ModelLoadError: the layout has no place for such a head.
    """
    every_tap = tuple(range(len(config.aux_layer_ids)))
    if config.reads_last_hidden or config.fc_norm_taps not in ((), every_tap):
        raise ModelLoadError(
            "the speculators layout has no place for heads on one hidden state or with only some taps normed; "
            "write the flat layout"
        )
    kind = PARALLEL if config.is_parallel else IN_TURN
    return {
        "architectures": ["PEagleSpeculator" if config.is_parallel else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        _LAYER: _layer_values(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "fc_norm": bool(config.fc_norm_taps),
        "embed_requires_grad": config.is_parallel,
        "logit_scale": config.logit_scale,
        "torch_dtype": dtype,
        **({"mask_token_id": config.mask_token_id} if config.is_parallel else {}),
    }


def _layer_values(config: HeadConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
