"""The head's rotary position embedding, with its own frequencies.

The frequencies come from `transformers` (all scaling types live there); they stay in float32 whatever the head is
converted to, and angles are computed for the positions at hand, so that there is no table to outgrow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.drafter.head_config import HeadConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """Angles of T rows."""

    cos: Tensor  # [T, 1, head_dim]
    sin: Tensor  # [T, 1, head_dim]

    def __call__(self, rows: Tensor) -> Tensor:
        """Rotate queries or keys [T, num_heads, head_dim]."""
        first, second = rows.chunk(2, -1)
        return rows * self.cos + torch.cat([-second, first], -1) * self.sin


class RotaryEmbedding(nn.Module):
    """Angles by position."""

    inv_freq: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        source = LlamaRotaryEmbedding(_rope_config(config))
        self.scaling = float(source.attention_scaling)
        self.register_buffer("inv_freq", source.inv_freq.float().clone(), persistent=False)  # [head_dim / 2]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        exact = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # A head in bfloat16 must not have its frequencies rounded: only their device follows.
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Angles of the positions [T]."""
        angles = positions[:, None].float() * self.inv_freq  # [T, head_dim / 2]
        angles = torch.cat([angles, angles], -1)[:, None]  # [T, 1, head_dim]
        return Rotation(cos=(angles.cos() * self.scaling).to(dtype), sin=(angles.sin() * self.scaling).to(dtype))


def _rope_config(config: HeadConfig) -> Any:
    parameters = dict(config.rope_scaling or {})
    rope_type = parameters.pop("type", "default")
    return LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": rope_type, "rope_theta": config.rope_theta, **parameters},
    )
