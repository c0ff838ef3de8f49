"""A draft head from its published tensors and formulas, in plain torch: one sequence, one row of scores at a time.

Written from the papers and the layouts, and from nothing of `peagle`: what the loader and the head are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class NaiveHead:
    """A head as it is published.

    Attributes:
        values: of config.json, in flat keys.
        tensors: by published names without `model.`; tables of the target have been added.
        first_layer: name of the first layer.
        final_norm: weight of the target's final norm, for heads on the target's last hidden state.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    first_layer: str = "midlayer"
    final_norm: Tensor | None = None

    @property
    def merges_embedding(self) -> bool:
        return "norm.weight" not in self.tensors

    def parallel_logits(self, token_ids: Sequence[int], features: Tensor, num_drafts: int) -> Tensor:
        """Logits of K drafts in one pass (P-EAGLE), over the draft vocabulary: [K, V_d]."""
        tokens = [*token_ids[1:], *[self.values["mask"]] * (num_drafts - 1)]
        mask = self._fc(self.tensors["mask_hidden"].double().reshape(1, -1))
        fused = torch.cat([self._fuse(features), mask.expand(num_drafts - 1, -1)])
        return self._logits(self._hidden(tokens, fused)[-num_drafts:])

    def logits_in_turn(self, token_ids: Sequence[int], features: Tensor, num_drafts: int) -> Tensor:
        """Logits of K drafts, one pass for each (EAGLE): [K, V_d]."""
        tokens, fused, rows = list(token_ids[1:]), self._fuse(features), []
        for _ in range(num_drafts):
            hidden = self._hidden(tokens, fused)[-1:]
            rows.append(self._logits(hidden))
            draft_id = int(rows[-1].argmax())
            offset = int(self.tensors["d2t"][draft_id]) if "d2t" in self.tensors else 0
            tokens.append(draft_id + offset)
            fused = torch.cat([fused, self._norm(hidden, "norm") if self.values.get("norm_output") else hidden])
        return torch.cat(rows)

    def _fuse(self, features: Tensor) -> Tensor:
        if self.final_norm is not None:
            return rms_norm(features, self.final_norm.double(), self.values["target_eps"])
        return self._fc(features)

    def _fc(self, features: Tensor) -> Tensor:
        if self.final_norm is not None:
            return features
        if "input_norm.weight" in self.tensors:
            features = self._norm(features, "input_norm")
        width = self.values.get("target_hidden_size", self.values["hidden_size"])
        parts = [features[:, start : start + width] for start in range(0, features.shape[1], width)]
        for i, part in enumerate(parts):
            if f"fc_norm.{i}.weight" in self.tensors:
                parts[i] = self._norm(part, f"fc_norm.{i}")
        return self._linear(torch.cat(parts, 1), "fc")

    def _hidden(self, tokens: list[int], fused: Tensor) -> Tensor:
        embedded = self.tensors["embed_tokens.weight"].double()[torch.tensor(tokens)]
        if self.merges_embedding:
            hidden = self._linear(torch.cat([embedded, fused], 1), "fc")
            hidden = self._layer(self.first_layer, hidden, hidden)
        else:
            feature = self._norm(fused, f"{self.first_layer}.hidden_norm")
            rows = torch.cat([self._norm(embedded, f"{self.first_layer}.input_layernorm"), feature], 1)
            hidden = self._layer(self.first_layer, rows, feature if self.values.get("norm_before_residual") else fused)
        for index in range(1, self.values["num_hidden_layers"]):
            hidden = self._layer(f"layers.{index}", self._norm(hidden, f"layers.{index}.input_layernorm"), hidden)
        return hidden

    def _layer(self, name: str, rows: Tensor, residual: Tensor) -> Tensor:
        hidden = residual + self._attention(f"{name}.self_attn", rows)
        normed = self._norm(hidden, f"{name}.post_attention_layernorm")
        gate = self._linear(normed, f"{name}.mlp.gate_proj")
        inner = gate / (1 + (-gate).exp()) * self._linear(normed, f"{name}.mlp.up_proj")
        return hidden + self._linear(inner, f"{name}.mlp.down_proj")

    def _attention(self, name: str, rows: Tensor) -> Tensor:
        size, num_rows = self.values["head_dim"], len(rows)
        query, key, value = (
            self._linear(rows, f"{name}.{part}_proj").reshape(num_rows, -1, size) for part in ("q", "k", "v")
        )
        if f"{name}.q_norm.weight" in self.tensors:
            query, key = self._norm(query, f"{name}.q_norm"), self._norm(key, f"{name}.k_norm")
        output = torch.zeros_like(query)
        for row in range(num_rows):
            for head in range(query.shape[1]):
                shared = head // (query.shape[1] // key.shape[1])
                keys = torch.stack([self._rotate(key[seen, shared], seen) for seen in range(row + 1)])
                scores = keys @ self._rotate(query[row, head], row) / math.sqrt(size)
                output[row, head] = scores.softmax(0) @ value[: row + 1, shared]
        return self._linear(output.reshape(num_rows, -1), f"{name}.o_proj")

    def _rotate(self, vector: Tensor, position: int) -> Tensor:
        half = len(vector) // 2
        turned = torch.empty_like(vector)
        for i in range(half):
            frequency = scaled_frequency(self.values["rope_theta"] ** (-i / half), self.values.get("rope_scaling"))
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            turned[i] = vector[i] * cos - vector[i + half] * sin
            turned[i + half] = vector[i + half] * cos + vector[i] * sin
        return turned

    def _logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.merges_embedding else self._norm(hidden, "norm")
        scale: float = self.values.get("logit_scale", 1.0)
        return self._linear(hidden, "lm_head") * scale

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        return rms_norm(rows, self.tensors[f"{name}.weight"].double(), self.values["rms_norm_eps"])

    def _linear(self, rows: Tensor, name: str) -> Tensor:
        output = rows @ self.tensors[f"{name}.weight"].double().T
        bias = self.tensors.get(f"{name}.bias")
        return output if bias is None else output + bias.double()


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def scaled_frequency(frequency: float, scaling: Mapping[str, Any] | None) -> float:
    """A rotary frequency, scaled as Llama 3 does."""
    if scaling is None:
        return frequency
    assert scaling["rope_type"] == "llama3"
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if turns < low:
        return float(frequency / scaling["factor"])
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return float((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
