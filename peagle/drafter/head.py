"""The draft head: a small Llama on the target's features. K drafts take one pass (P-EAGLE) or K (EAGLE-3).

Terms: *slot* p pairs the embedding of the token at position p + 1 with the target's feature at position p, has rotary
position p and predicts the token at p + 2. The *newest slot* holds the newest token. *Mask slots* follow it, with the
mask token's embedding and the learned `mask_hidden` in place of a feature. A *fused* feature is `fc` of the target's
auxiliary hidden states, concatenated from low to high layers; `fc` of `mask_hidden` is the same vector for every mask
slot (P-EAGLE, arXiv 2602.01469; the first layer is EAGLE-3's, arXiv 2503.01840). A head that drafts in turn has *draft
slots* instead: the draft before, and what the head itself made of the slot before in place of a feature.

A head on the target's last hidden state gets the residual stream behind the last layer, and applies the target's own
final norm to it: EAGLE, and vLLM for EAGLE-3 with `use_aux_hidden_state` false, hand the head what lm_head would get.

Owns the mathematics. Refuses to know caches, masks and batches: attention is a function it is given, dense in
training, paged in serving.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from peagle.drafter.head_config import HeadConfig
from peagle.drafter.rope import RotaryEmbedding, Rotation

# attend(layer_index, query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim]) -> as query
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class HeadAttention(nn.Module):
    """Projections around attention; the input is wider than the head in the first layer."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, rows: Tensor, rotate: Rotation, attend: Attend, layer_index: int) -> Tensor:
        """Attention output of rows [T, input_size]: [T, H]."""
        query = self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.head_dim)))  # [T, num_heads, head_dim]
        key = self.k_norm(self.k_proj(rows).unflatten(-1, (-1, self.head_dim)))  # [T, num_kv_heads, head_dim]
        value = self.v_proj(rows).unflatten(-1, (-1, self.head_dim))
        output: Tensor = self.o_proj(attend(layer_index, rotate(query), rotate(key), value).flatten(1))
        return output


class HeadMLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, rows: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        output: Tensor = self.down_proj(self.act(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class HeadLayer(nn.Module):
    """A Llama decoder layer over slots."""

    def __init__(self, config: HeadConfig, *, input_size: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = HeadAttention(config, input_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = HeadMLP(config)

    def forward(self, hidden: Tensor, rotate: Rotation, attend: Attend, layer_index: int) -> Tensor:
        """[T, H] -> [T, H]."""
        return self._finish(hidden, self.self_attn(self.input_layernorm(hidden), rotate, attend, layer_index))

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = residual + attended
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class FirstHeadLayer(HeadLayer):
    """EAGLE-3's first layer: attends over [embedding; feature], and adds to the feature."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, input_size=2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._norm_before_residual = config.norm_before_residual

    def merge(self, embedded: Tensor, fused: Tensor, rotate: Rotation, attend: Attend) -> Tensor:
        """Embeddings and fused features, both [T, H] -> [T, H]."""
        feature = self.hidden_norm(fused)
        rows = torch.cat([self.input_layernorm(embedded), feature], -1)  # [T, 2H]
        attended = self.self_attn(rows, rotate, attend, 0)
        return self._finish(feature if self._norm_before_residual else fused, attended)


class DraftHead(nn.Module):
    """Parameters and forward pass of a head. Float type and device are those of its parameters."""

    draft_to_target_offsets: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.is_parallel:
            self.mask_hidden = nn.Parameter(torch.randn(config.feature_size))  # [n_aux * H_t], before `fc`
        size, eps = config.target_hidden_size, config.rms_norm_eps
        if config.target_norm_eps is not None:
            self.target_norm = nn.RMSNorm(size, eps=config.target_norm_eps)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_size, eps=eps)
        self.fc_norm = nn.ModuleDict({str(tap): nn.RMSNorm(size, eps=eps) for tap in config.fc_norm_taps})
        if not config.reads_last_hidden:
            self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        later = [HeadLayer(config, input_size=config.hidden_size) for _ in range(config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([FirstHeadLayer(config), *later])
        self.norm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config)
        self.register_buffer("draft_to_target_offsets", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def is_parallel(self) -> bool:
        """True if all drafts come out of one pass, False if one after the other."""
        return self.config.is_parallel

    @property
    def dtype(self) -> torch.dtype:
        """Float type of the arithmetic."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the head lives."""
        return self.embed_tokens.weight.device

    @property
    def scaling(self) -> float:
        """Factor on attention scores; `attend` applies it."""
        return float(self.config.head_dim**-0.5)

    def fuse(self, features: Tensor) -> Tensor:
        """Features [T, n_aux * H_t] of the target, any float type, as the head's own: [T, H]."""
        features = features.to(self.dtype)
        return self._project(self.target_norm(features) if self.config.reads_last_hidden else features)

    def fused_mask(self) -> Tensor:
        """The fused feature of every mask slot, [H]. Constant in serving; differentiable in training."""
        return self._project(self.mask_hidden[None])[0]

    def _project(self, features: Tensor) -> Tensor:
        if self.config.reads_last_hidden:
            return features
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.fc_norm:
            taps = torch.split(features, self.config.target_hidden_size, -1)  # n_aux of [T, H_t]
            norms: list[Tensor] = [
                self.fc_norm[str(index)](tap) if str(index) in self.fc_norm else tap for index, tap in enumerate(taps)
            ]
            features = torch.cat(norms, -1)
        output: Tensor = self.fc(features)
        return output

    def forward(self, token_ids: Tensor, fused: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states of T slots, before the final norm.

        Args:
            token_ids: [T] int64, the token after each slot's position, or the mask token.
            fused: [T, H], from `fuse`, `fused_mask` or `feed_back`.
            positions: [T] int64.
            attend: attention of one layer over what each slot may see.

        Returns:
            [T, H].
        """
        rotate = self.rotary(positions, self.dtype)
        first, *later = self.layers
        hidden = self._first_layer(first, self.embed_tokens(token_ids), fused, rotate, attend)
        for index, layer in enumerate(later, start=1):
            hidden = layer(hidden, rotate, attend, index)
        return hidden

    def _first_layer(
        self, layer: nn.Module, embedded: Tensor, fused: Tensor, rotate: Rotation, attend: Attend
    ) -> Tensor:
        assert isinstance(layer, FirstHeadLayer)
        return layer.merge(embedded, fused, rotate, attend)

    def feed_back(self, hidden: Tensor) -> Tensor:
        """What stands in place of a fused feature in the slot behind one with this hidden state, both [N, H]."""
        output: Tensor = self.norm(hidden) if self.config.norm_output else hidden
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary of hidden states [N, H]: [N, V_d]."""
        output: Tensor = self.lm_head(self.norm(hidden))
        return output if self.config.logit_scale == 1.0 else output * self.config.logit_scale

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of ids in the draft vocabulary, any shape."""
        return draft_ids + self.draft_to_target_offsets[draft_ids]
