"""The fast path for Llama-shaped targets: one fused loop over the layers of a loaded model.

On a small model the interpreter is a third of a step, so the pass that `transformers` makes through eight modules per
layer is done here in one function: query, key and value in one product, gate and up in one product, the rotation in
three operations. The arithmetic is the family's own and is compared with the unmodified model in the tests.

Owns the fusion of weights and the loop. Refuses to know attention kernels and every family but the ones in `FUSABLE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peagle.attention.backend import AttentionBackend
from peagle.attention.metadata import AttentionMetadata
from peagle.kv_cache.storage import KVStorage
from peagle.layers.linear import PackedLinear, fuse_linears, pad_to_even
from peagle.models.interface import TargetOutput
from peagle.models.transformers_target import geometry_of

FUSABLE = ("llama", "qwen3")

Linear = Callable[[Tensor], Tensor]


def is_fusable(config: Any) -> bool:
    """Whether the loop below is the arithmetic of this `transformers` configuration."""
    return config.model_type in FUSABLE and config.hidden_act == "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """Weights of one decoder layer, ready to multiply."""

    input_norm: Tensor  # [hidden_size]
    qkv: Linear  # hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim
    query_norm: Tensor | None  # [head_dim], Qwen3 only
    key_norm: Tensor | None  # [head_dim], Qwen3 only
    output: Linear  # num_heads * head_dim -> hidden_size
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size -> 2 * intermediate_size
    down: Linear  # intermediate_size -> hidden_size
    sliding_window: int | None


class FusedTarget:
    """See `TargetModel`. Takes the weights out of `model`, which must not be used afterwards.

    Args:
        model: a loaded Llama or Qwen3 model.
        backend: attention over paged keys and values.
        tap_layer_ids: the residual stream entering these layers goes to the drafter.
        packed: store the weights as packed fp16 and multiply in float32 (CPU only).
    """

    def __init__(
        self, model: PreTrainedModel, backend: AttentionBackend, tap_layer_ids: tuple[int, ...] = (), *, packed: bool
    ) -> None:
        config = model.config
        self.geometry = geometry_of(config)
        self._backend = backend
        self._tap_layer_ids = frozenset(tap_layer_ids)
        self._num_heads: int = config.num_attention_heads
        self._eps: float = config.rms_norm_eps
        self.dtype: torch.dtype = torch.float32 if packed else model.dtype
        self._pad: Linear = pad_to_even if packed else lambda rows: rows
        self._rotary = model.model.rotary_emb
        # a copy: the loaded tensor is a view of the mapped checkpoint file and would keep all of it in memory
        self._embedding = model.model.embed_tokens.weight.detach().clone()  # [vocab_size, hidden_size]
        self._final_norm = self._vector(model.model.norm)
        self._lm_head = _seal(model.lm_head, packed)
        self._layers = [self._take_layer(layer, packed) for layer in model.model.layers]

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, storage: KVStorage
    ) -> TargetOutput:
        """Run every layer over the rows, writing their keys and values. See `TargetModel.forward`.

        Padding is added once, here, and after attention, which has no output for it.
        """
        num_rows = input_ids.shape[0]
        hidden = self._pad(self._embedding.index_select(0, input_ids).to(self.dtype))  # [num_padded, hidden_size]
        cos, sin = self._rotation(hidden, self._pad(positions))
        taps: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            if index in self._tap_layer_ids:
                taps.append(hidden.clone())  # the residual stream below is changed in place
            hidden = hidden.add_(self._attention(layer, hidden, cos, sin, metadata, storage, index))
            hidden = hidden.add_(self._mlp(layer, hidden))
        if len(self._layers) in self._tap_layer_ids:
            taps.append(hidden)
        features = torch.cat(taps, -1)[:num_rows] if taps else None
        return TargetOutput(hidden=self._norm(hidden[:num_rows], self._final_norm), features=features)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of selected rows: [num_selected, hidden_size] -> [num_selected, vocab_size]."""
        return self._lm_head(hidden)

    def _rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign of the half they belong to: each [num_rows, 1, head_dim]."""
        cos, sin = self._rotary(hidden, positions[None])
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        return cos[0, :, None], signed[:, None]

    def _attention(
        self,
        layer: FusedLayer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        metadata: AttentionMetadata,
        storage: KVStorage,
        index: int,
    ) -> Tensor:
        geometry = self.geometry
        num_rotated = self._num_heads + geometry.num_kv_heads
        qkv = layer.qkv(self._norm(hidden, layer.input_norm))
        heads = qkv.view(-1, num_rotated + geometry.num_kv_heads, geometry.head_dim)
        rotated = heads[:, :num_rotated]  # queries, then keys
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
            rotated = torch.cat([self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)], 1)
        half_turned = rotated.roll(geometry.head_dim // 2, -1)
        rotated = torch.addcmul(rotated * cos, half_turned, sin)
        num_rows = metadata.num_rows
        attended = self._backend(
            rotated[:num_rows, : self._num_heads],
            rotated[:num_rows, self._num_heads :],
            heads[:num_rows, num_rotated:],
            storage.layers[index],
            metadata,
            scaling=geometry.head_dim**-0.5,
            sliding_window=layer.sliding_window,
        )
        return layer.output(self._pad(attended.flatten(1)))

    def _mlp(self, layer: FusedLayer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up))

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        if rows.dtype == torch.float32:
            return F.rms_norm(rows, (rows.shape[-1],), weight, self._eps)
        # transformers normalises in float32 whatever the type, and rounds before the weight.
        return weight * F.rms_norm(rows.float(), (rows.shape[-1],), None, self._eps).to(rows.dtype)

    def _vector(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight.detach().to(self.dtype)
        return weight

    def _take_layer(self, layer: Any, packed: bool) -> FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        has_head_norms = hasattr(attention, "q_norm")
        fused = FusedLayer(
            input_norm=self._vector(layer.input_layernorm),
            qkv=_seal(fuse_linears([attention.q_proj, attention.k_proj, attention.v_proj]), packed),
            query_norm=self._vector(attention.q_norm) if has_head_norms else None,
            key_norm=self._vector(attention.k_norm) if has_head_norms else None,
            output=_seal(attention.o_proj, packed),
            mlp_norm=self._vector(layer.post_attention_layernorm),
            gate_up=_seal(fuse_linears([mlp.gate_proj, mlp.up_proj]), packed),
            down=_seal(mlp.down_proj, packed),
            sliding_window=getattr(attention, "sliding_window", None),
        )
        layer.to("meta")  # the weights live in the fused layer now; holding both would double the memory
        return fused


def _seal(linear: nn.Linear, packed: bool) -> Linear:
    """A product with frozen weights, packed or plain."""
    if packed:
        return PackedLinear(linear.weight.detach(), linear.bias)
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    return lambda rows: F.linear(rows, weight, bias)
