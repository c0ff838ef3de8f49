"""What a draft head's config.json says, checked, with every default written out.

Owns the flat layout's keys (a Llama configuration and EAGLE's additions, as published with Amazon's P-EAGLE heads) and
refuses by name what would change the mathematics without being implemented. Refuses to know torch and tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import ModelLoadError

_MASK_ID_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_REFUSED_IF_TRUE = ("norm_before_fc", "norm_output", "use_sliding_window")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What a head has to fit."""

    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Geometry and constants of a head.

    Attributes:
        hidden_size: H, width of the head.
        target_hidden_size: H_t, width of each tapped layer.
        aux_layer_ids: target layers before which the residual stream is tapped, ascending.
        vocab_size: V, rows of the embedding table.
        draft_vocab_size: V_d, rows of the head's lm_head.
        mask_token_id: row of the head's embedding table in mask slots; None for a head that cannot draft in parallel.
        norm_before_residual: the first layer's residual is the normed feature instead of the feature.
        rope_theta: base of the rotary embedding; the head's own, not the target's.
        rope_scaling: the file's `rope_scaling`, or None.
        logit_scale: factor on the logits.
        num_speculative_tokens: drafts that the head was made for, where the file says so.
        fc_norm_taps: taps, by their place in `aux_layer_ids`, that are RMS-normed before `fc` (EAGLE-3.1).
    """

    hidden_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    mask_token_id: int | None
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    norm_before_residual: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    logit_scale: float = 1.0
    fc_norm_taps: tuple[int, ...] = ()
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelLoadError(
                f"draft head: num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ModelLoadError(
                f"draft head: draft_vocab_size {self.draft_vocab_size} is larger than vocab_size {self.vocab_size}"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ModelLoadError(
                f"draft head: mask token id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        rope_type = (self.rope_scaling or {}).get("rope_type", (self.rope_scaling or {}).get("type", "default"))
        if rope_type not in _ROPE_TYPES:
            # The others choose frequencies by the longest sequence of a batch, so one request would change another.
            raise ModelLoadError(f"draft head: rope_type {rope_type!r} is not served; served: {', '.join(_ROPE_TYPES)}")

    @property
    def feature_size(self) -> int:
        """Width of a feature before `fc`: n_aux * H_t."""
        return len(self.aux_layer_ids) * self.target_hidden_size

    @property
    def is_parallel(self) -> bool:
        """True if all drafts come out of one pass (P-EAGLE), False if one after the other (EAGLE-3)."""
        return self.mask_token_id is not None


def read_head_config(path: Path, target: TargetShape) -> HeadConfig:
    """Read a flat config.json.

    Raises:
        ModelLoadError: the file is missing or broken, a key is missing, or the head needs what is not served.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"no draft head at {path.parent}: config.json is missing") from None
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return parse_head_config(values, target)


def parse_head_config(values: Mapping[str, Any], target: TargetShape) -> HeadConfig:
    """The configuration in a parsed config.json. See `read_head_config`."""
    _refuse_unserved(values)
    num_heads = _require(values, "num_attention_heads")
    hidden_size = _require(values, "hidden_size")
    aux_layer_ids = _aux_layer_ids(values, target.num_layers)
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
        num_speculative_tokens=values.get("num_speculative_tokens") or values.get("num_depths"),
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


def _refuse_unserved(values: Mapping[str, Any]) -> None:
    if "speculators_model_type" in values or "transformer_layer_config" in values:
        raise ModelLoadError("the draft head is in the speculators layout; only the flat layout is read")
    if values.get("model_type", "llama") != "llama":
        raise ModelLoadError(f"draft heads of model_type {values['model_type']!r} are not served; only 'llama' is")
    eagle_config = values.get("eagle_config") or {}
    if eagle_config.get("use_aux_hidden_state", values.get("use_aux_hidden_state", True)) is False:
        raise ModelLoadError(
            "the draft head sets use_aux_hidden_state to false; heads on one hidden state are not served"
        )
    for key in _REFUSED_IF_TRUE:
        if values.get(key):
            raise ModelLoadError(f"the draft head sets {key}, which is not served")


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
