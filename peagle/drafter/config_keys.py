"""From a head's config.json, in flat keys, to what the head is, with every default written out.

The flat keys are a Llama configuration and EAGLE's additions, as published with Amazon's P-EAGLE heads and with EAGLE's
own; the nested layout is flattened before (`speculators_layout`). What config.json leaves open is read off the names of
the tensors. Owns the keys, and refuses by name what would change the mathematics without being implemented. Refuses to
know files and tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from peagle.drafter.head_config import HeadConfig, TargetShape
from peagle.errors import ModelLoadError

_MASK_ID_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_MODEL_TYPES = ("llama", "qwen3")
_REFUSED_IF_TRUE = ("use_sliding_window", "quantization_config", "compression_config", "qkv_bias", "add_para_norm")
_FIRST_LAYER_NORMS = ("norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")


def parse_head_config(values: Mapping[str, Any], target: TargetShape, tensor_names: Collection[str]) -> HeadConfig:
    """What a head is.

    Args:
        values: of config.json, flat.
        target: what the head has to fit.
        tensor_names: the tensors in the head's files, by the head's own names.

    Raises:
        ModelLoadError: a key is missing or wrong, the head needs what is not served, or it does not fit the target.
    """
    _refuse_unserved(values)
    num_heads = _require(values, "num_attention_heads")
    hidden_size = _require(values, "hidden_size")
    merges_embedding = "fc.weight" in tensor_names and not any(name in tensor_names for name in _FIRST_LAYER_NORMS)
    reads_last_hidden = merges_embedding or not _uses_taps(values)
    aux_layer_ids = (target.num_layers,) if reads_last_hidden else _aux_layer_ids(values, target.num_layers)
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    config = HeadConfig(
        hidden_size=hidden_size,
        target_hidden_size=_or(values.get("target_hidden_size"), hidden_size),
        aux_layer_ids=aux_layer_ids,
        num_hidden_layers=_require(values, "num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=_or(values.get("num_key_value_heads"), num_heads),
        head_dim=_or(values.get("head_dim"), hidden_size // num_heads),
        intermediate_size=_require(values, "intermediate_size"),
        vocab_size=_require(values, "vocab_size"),
        draft_vocab_size=_or(values.get("draft_vocab_size"), values["vocab_size"]),
        mask_token_id=_mask_token_id(values),
        max_position_embeddings=_or(values.get("max_position_embeddings"), 2048),
        rope_theta=float(rope.pop("rope_theta", None) or values.get("rope_theta") or 10000.0),
        rope_scaling=rope or None,
        rms_norm_eps=_or(values.get("rms_norm_eps"), 1e-6),
        hidden_act=_or(values.get("hidden_act"), "silu"),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        attention_bias=bool(values.get("attention_bias", False)),
        mlp_bias=bool(values.get("mlp_bias", False)),
        logit_scale=_or(values.get("logit_scale"), 1.0),
        fc_norm_taps=_fc_norm_taps(values.get("fc_norm"), len(aux_layer_ids)),
        num_speculative_tokens=_num_speculative_tokens(values),
        norm_before_fc=bool(values.get("norm_before_fc", False)),
        norm_output=bool(values.get("norm_output", False)),
        qk_norm="layers.0.self_attn.q_norm.weight" in tensor_names,
        target_norm_eps=_target_norm_eps(target) if reads_last_hidden else None,
        merges_embedding=merges_embedding,
        fc_bias="fc.bias" in tensor_names,
    )
    _check_fit(config, target)
    return config


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _require(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"draft head config.json: {key} must be a positive number, got {value!r}")
    return value


def _num_speculative_tokens(values: Mapping[str, Any]) -> int | None:
    """NeMo's `num_depths` is the number that the head was trained for."""
    given = [key for key in ("num_speculative_tokens", "num_depths") if values.get(key) is not None]
    return _require(values, given[0]) if given else None


def _refuse_unserved(values: Mapping[str, Any]) -> None:
    model_type = values.get("model_type", "llama")
    if model_type not in _MODEL_TYPES:
        raise ModelLoadError(
            f"draft heads of model_type {model_type!r} are not served; served: {', '.join(_MODEL_TYPES)}"
        )
    for key in _REFUSED_IF_TRUE:
        if values.get(key):
            raise ModelLoadError(f"the draft head sets {key}, which is not served")
    windowed = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    if windowed:
        raise ModelLoadError(f"the draft head has layers of {', '.join(windowed)}; only full_attention is served")


def _uses_taps(values: Mapping[str, Any]) -> bool:
    eagle_config = values.get("eagle_config") or {}
    return bool(eagle_config.get("use_aux_hidden_state", values.get("use_aux_hidden_state", True)))


def _target_norm_eps(target: TargetShape) -> float:
    if target.final_norm_eps is None:
        raise ModelLoadError(
            "the draft head reads the target's last hidden state behind the final norm, and this target's final norm "
            "is no plain RMSNorm; use a head on several taps (EAGLE-3 with use_aux_hidden_state true)"
        )
    return target.final_norm_eps


def _aux_layer_ids(values: Mapping[str, Any], num_target_layers: int) -> tuple[int, ...]:
    ids = values.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = (2, num_target_layers // 2, num_target_layers - 3)
    ids = tuple(ids)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_target_layers:
        raise ModelLoadError(
            f"draft head: eagle_aux_hidden_state_layer_ids {list(ids)} must be ascending layers of the target, which "
            f"has {num_target_layers}; give them in config.json (absent, they are 2, N/2 and N-3)"
        )
    return ids


def _fc_norm_taps(value: Any, num_taps: int) -> tuple[int, ...]:
    """`true` is every tap, as published; our own heads list the taps that are normed."""
    if isinstance(value, list) and all(type(tap) is int and 0 <= tap < num_taps for tap in value):
        return tuple(sorted(set(value)))
    if value is None or isinstance(value, bool):
        return tuple(range(num_taps)) if value else ()
    raise ModelLoadError(f"draft head: fc_norm must be true, false or a list of taps below {num_taps}, got {value!r}")


def _mask_token_id(values: Mapping[str, Any]) -> int | None:
    found = [(values.get("dflash_config") or {}).get("mask_token_id"), *(values.get(key) for key in _MASK_ID_KEYS)]
    for token_id in found:
        if token_id is not None:
            return int(token_id)
    return None


def _check_fit(config: HeadConfig, target: TargetShape) -> None:
    if config.target_hidden_size != target.hidden_size:
        raise ModelLoadError(
            f"the draft head was made for a target of hidden size {config.target_hidden_size}; "
            f"this target has {target.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        raise ModelLoadError(
            f"the draft head's vocab_size is {config.vocab_size}, the target's {target.vocab_size}: "
            "it was made for another target"
        )
