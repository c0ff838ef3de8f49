"""Any supported `transformers` model as a target, with its attention routed to our paged backend.

`transformers` lets a function stand in for attention (`AttentionInterface`) and hands extra keyword arguments of the
forward pass down to it, so that the paged context travels as an argument and nothing is global. The residual stream is
tapped by hooks on the decoder layers. Owns this adaptation. Refuses to know how attention is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from peagle.attention.backend import AttentionBackend
from peagle.attention.metadata import AttentionMetadata
from peagle.kv_cache.storage import KVStorage
from peagle.models.interface import TargetGeometry, TargetOutput

ATTENTION_NAME = "peagle_paged"


@dataclass(frozen=True, slots=True)
class PagedContext:
    """What attention needs beside queries, keys and values; travels through the model as a keyword argument."""

    backend: AttentionBackend
    metadata: AttentionMetadata
    storage: KVStorage


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: PagedContext,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function behind `AttentionInterface`.

    Args:
        module: the attention layer; its `layer_idx` chooses the cache.
        query: [1, num_heads, num_rows, head_dim], rotated.
        key: [1, num_kv_heads, num_rows, head_dim], rotated.
        value: [1, num_kv_heads, num_rows, head_dim].
        attention_mask: None; the layout in `paged` takes its place.
        scaling: factor on the scores.
        paged: layout, cache and backend of this step.
        sliding_window: keys that a row sees at most, in layers that have one.
        s_aux: attention sinks, [num_heads], in models that have them.
    """
    del attention_mask
    output = paged.backend(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        paged.storage.layers[int(module.layer_idx)],  # type: ignore[arg-type]
        paged.metadata,
        scaling=scaling,
        sliding_window=sliding_window,
        sinks=s_aux,
    )
    return output[None], None  # [1, num_rows, num_heads, head_dim]


class TransformersTarget:
    """See `TargetModel`. Serves every family of `registry`.

    Args:
        model: a loaded `transformers` causal LM in eval mode.
        backend: attention over paged keys and values.
        tap_layer_ids: the residual stream *entering* these layers is handed to the drafter (`num_layers` means the
            output of the last one). Empty: nothing is tapped.
        num_ranks: processes between which the model is split; keys and values here are of this one's heads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        tap_layer_ids: tuple[int, ...] = (),
        *,
        num_ranks: int = 1,
    ) -> None:
        AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
        model.set_attn_implementation(ATTENTION_NAME)
        geometry = geometry_of(model.config)
        self.geometry = replace(geometry, num_kv_heads=geometry.num_kv_heads // num_ranks)
        self.dtype: torch.dtype = model.dtype
        self._model = model
        self._backend = backend
        self._taps: dict[int, Tensor] = {}
        self._tap_layer_ids = tap_layer_ids
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._install_taps()

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, storage: KVStorage
    ) -> TargetOutput:
        """Run every layer over the rows, writing their keys and values. See `TargetModel.forward`."""
        output = self._model.model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            paged=PagedContext(self._backend, metadata, storage),
        )
        features = None
        if self._tap_layer_ids:
            features = torch.cat([self._taps.pop(layer_id) for layer_id in sorted(self._tap_layer_ids)], -1)
        return TargetOutput(hidden=output.last_hidden_state[0], features=features)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of selected rows: [num_selected, hidden_size] -> [num_selected, vocab_size]."""
        logits: Tensor = self._model.lm_head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _install_taps(self) -> None:
        layers = self._model.model.layers
        for layer_id in self._tap_layer_ids:
            if layer_id < len(layers):
                layers[layer_id].register_forward_pre_hook(self._entering(layer_id))
            else:
                layers[-1].register_forward_hook(self._leaving(layer_id))

    def _entering(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._taps[layer_id] = args[0][0]

        return hook

    def _leaving(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
            self._taps[layer_id] = output[0]

        return hook


def geometry_of(config: Any) -> TargetGeometry:
    """Read the numbers that the engine needs from a `transformers` configuration."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return TargetGeometry(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
    )
