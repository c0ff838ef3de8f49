"""The head of EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858): `fc` merges embedding and feature, then plain layers.

It predicts the target's last hidden state itself, behind the target's final norm. So there is no norm of its own at the
end, what it puts out is fed back as it is, and lm_head is the target's unless the file has one. The first layer has no
input norm. Owns these differences to `DraftHead`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peagle.drafter.head import Attend, DraftHead, HeadLayer
from peagle.drafter.head_config import HeadConfig
from peagle.drafter.rope import Rotation


class MergingHead(DraftHead):
    """See `DraftHead`; `config.merges_embedding` is set."""

    def __init__(self, config: HeadConfig) -> None:
        assert config.merges_embedding
        assert config.reads_last_hidden
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        first = HeadLayer(config, input_size=config.hidden_size)
        first.input_layernorm = nn.Identity()  # type: ignore[assignment]
        self.layers[0] = first
        self.norm = nn.Identity()  # type: ignore[assignment]

    def _first_layer(
        self, layer: nn.Module, embedded: Tensor, fused: Tensor, rotate: Rotation, attend: Attend
    ) -> Tensor:
        output: Tensor = layer(self.fc(torch.cat([embedded, fused], -1)), rotate, attend, 0)
        return output


def make_head(config: HeadConfig) -> DraftHead:
    """A head of the kind that `config` describes, with random weights."""
    return MergingHead(config) if config.merges_embedding else DraftHead(config)
