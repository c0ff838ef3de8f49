"""What a draft head is, whatever layout its files have: geometry and constants, checked.

Owns the fields and what contradicts itself among them. Refuses to know files (`config_keys`) and torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.errors import ModelLoadError

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What a head has to fit.

    Attributes:
        final_norm_eps: epsilon of the target's final RMSNorm; None if it is no plain RMSNorm, so that heads on the
            target's last hidden state cannot be served.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    final_norm_eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Geometry and constants of a head.

    Attributes:
        hidden_size: H, width of the head.
        target_hidden_size: H_t, width of each tapped layer.
        aux_layer_ids: target layers before which the residual stream is tapped, ascending; the number of layers means
            behind the last one.
        vocab_size: V, rows of the embedding table.
        draft_vocab_size: V_d, rows of the head's lm_head.
        mask_token_id: row of the head's embedding table in mask slots; None for a head that cannot draft in parallel.
        norm_before_residual: the first layer's residual is the normed feature instead of the feature.
        rope_theta: base of the rotary embedding; the head's own, not the target's.
        rope_scaling: the file's `rope_scaling`, or None.
        logit_scale: factor on the logits.
        num_speculative_tokens: drafts that the head was made for, where the file says so.
        fc_norm_taps: taps, by their place in `aux_layer_ids`, that are RMS-normed before `fc` (EAGLE-3.1).
        norm_before_fc: all taps together are RMS-normed before `fc`.
        norm_output: what a head that drafts in turn reads of its own last slot is its hidden state behind the final
            norm (EAGLE-3.1), not before it.
        qk_norm: queries and keys are RMS-normed head by head, as in Qwen3.
        target_norm_eps: epsilon of the target's final norm if the feature is the target's last hidden state behind
            that norm, the only one there is; None if features are taps.
        merges_embedding: `fc` merges embedding and feature before plain layers, and there is no final norm (EAGLE and
            EAGLE-2); otherwise `fc` merges taps, and the first layer reads embedding and feature (EAGLE-3).
        fc_bias: `fc` has a bias; only some heads that merge the embedding do.
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
    norm_before_fc: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    target_norm_eps: float | None = None
    merges_embedding: bool = False
    fc_bias: bool = False

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
        self._check_feature()

    def _check_feature(self) -> None:
        if self.norm_before_fc and self.fc_norm_taps:
            raise ModelLoadError("draft head: norm_before_fc and fc_norm exclude each other, and both are set")
        if not self.reads_last_hidden:
            return
        if self.target_hidden_size != self.hidden_size:
            raise ModelLoadError(
                f"draft head: on one hidden state of the target, {self.target_hidden_size} wide, there is no fc that "
                f"could bring it to the head's hidden_size {self.hidden_size}; they must be equal"
            )
        if self.norm_before_fc or self.fc_norm_taps:
            raise ModelLoadError("draft head: norm_before_fc and fc_norm need several taps, and it reads one")

    @property
    def feature_size(self) -> int:
        """Width of a feature before `fc`: n_aux * H_t."""
        return len(self.aux_layer_ids) * self.target_hidden_size

    @property
    def is_parallel(self) -> bool:
        """True if all drafts come out of one pass (P-EAGLE), False if one after the other (EAGLE-3)."""
        return self.mask_token_id is not None

    @property
    def reads_last_hidden(self) -> bool:
        """True if the feature is the target's last hidden state, False if it is taps of the residual stream."""
        return self.target_norm_eps is not None
