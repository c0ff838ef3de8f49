"""The P-EAGLE drafter: every committed token of a step goes through the head, and logits for K depths come out of the
same pass; what drafts are made of them is a choice of its own (`choice`).

Its keys and values live in its own pool, over the whole context of each sequence. A mask slot's key and value are
placeholders: the next step writes the slot again from a real token and feature before any row can see it, which is why
rejected drafts need no clean-up.

Owns the head, the pool and the pass. Refuses to know who owns which block, and never writes to a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.attention.backend import AttentionBackend
from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.drafter.choice import DraftChoice, LikeliestChain, Picked
from peagle.drafter.draft_tensors import DraftTensors, to_tensors
from peagle.drafter.head import DraftHead
from peagle.drafter.inputs import DraftInputs, DraftShape, SlotRules, build_inputs
from peagle.drafter.interface import DraftBatch, DraftProposal
from peagle.kv_cache.storage import KVGeometry, KVStorage


def kv_geometry(head: DraftHead, *, block_size: int, dtype: torch.dtype | None = None) -> KVGeometry:
    """Shape of the head's keys and values; their type is the head's unless given."""
    return KVGeometry(
        block_size=block_size,
        num_kv_heads=head.config.num_key_value_heads,
        head_dim=head.config.head_dim,
        dtype=dtype or head.dtype,
        device=head.device,
    )


class PEagleDrafter:
    """See `Drafter`.

    Args:
        head: loaded, and packed if it is to be.
        attention: backend for the head's layers.
        num_speculative_tokens: K, at least 1: how deep drafts go.
        storage: pool of the head's keys and values, of `kv_geometry` and `head.config.num_hidden_layers` layers.
        max_model_len: positions from here on are never drafted.
        choice: which drafts are made of the logits; None: a chain of the likeliest tokens.
    """

    def __init__(
        self,
        *,
        head: DraftHead,
        attention: AttentionBackend,
        num_speculative_tokens: int,
        storage: KVStorage,
        max_model_len: int,
        choice: DraftChoice | None = None,
    ) -> None:
        assert num_speculative_tokens >= 1
        assert head.config.mask_token_id is not None
        assert len(storage.layers) == head.config.num_hidden_layers
        self.head = head
        self.storage = storage
        self._choice = choice or LikeliestChain(head)
        self.num_speculative_tokens = self._choice.max_num_drafts(num_speculative_tokens)
        self.num_mask_slots = num_speculative_tokens - 1
        self.num_layers = head.config.num_hidden_layers
        self.aux_layer_ids = head.config.aux_layer_ids
        self._attention = attention
        self._rules = SlotRules(
            num_speculative_tokens=num_speculative_tokens,
            mask_token_id=head.config.mask_token_id,
            block_size=storage.block_size,
            null_slot=storage.null_slot,
            max_model_len=max_model_len,
        )
        self._fused_mask = head.fused_mask().detach()  # [H]

    def propose(self, batch: DraftBatch) -> DraftProposal:
        """Take in every committed token of the step, and draft for the sequences with `max_next_drafts` > 0."""
        inputs = self.lay_out(batch)
        return self.to_proposal(batch, inputs, self.draft(batch.features, self.to_tensors(inputs)))

    def lay_out(self, batch: DraftBatch, shape: DraftShape | None = None) -> DraftInputs:
        """Host side of a pass; see `build_inputs`."""
        return build_inputs(batch, self._rules, shape)

    def to_tensors(self, inputs: DraftInputs) -> DraftTensors:
        """The inputs on the head's device."""
        return to_tensors(inputs, block_size=self.storage.block_size, dtype=self.head.dtype, device=self.head.device)

    def to_proposal(self, batch: DraftBatch, inputs: DraftInputs, picked: Picked) -> DraftProposal:
        """The drafts of a pass, without padding and what nobody asked for."""
        return self._choice.propose(batch, inputs, picked)

    @torch.no_grad()
    def draft(self, features: Tensor, tensors: DraftTensors) -> dict[str, Tensor]:
        """Write the keys and values of all slots, and pick what drafts are made of.

        Args:
            features: [num_rows, n_aux * H_t], auxiliary hidden states of the target's rows.
            tensors: of the pass.
        """
        logits = self.draft_logits(features, tensors)  # [D * K, V_d]
        return self._choice.pick(logits.view(*tensors.logits_rows.shape, logits.shape[-1]))

    @torch.no_grad()
    def draft_logits(self, features: Tensor, tensors: DraftTensors) -> Tensor:
        """As `draft`, but the logits over the draft vocabulary: [D * K, V_d]."""
        if not tensors.token_ids.numel():
            return self._fused_mask.new_empty(0, self.head.config.draft_vocab_size)

        def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self.storage.layers[layer_index]
            return self._attention(query, key, value, cache, tensors.attention, scaling=self.head.scaling)

        # A target row that is not finite fails its own request; its NaN must not stay in blocks that others get later.
        fused = self.head.fuse(features).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        # Behind the fused features of all rows stands that of the mask: one gather serves every slot.
        fused = torch.cat([fused, self._fused_mask[None]])  # [num_rows + 1, H]
        hidden: Tensor = self.head(tensors.token_ids, fused[tensors.feature_rows], tensors.positions, attend)
        if not tensors.logits_rows.numel():
            return hidden.new_empty(0, self.head.config.draft_vocab_size)
        return self.head.logits(hidden[tensors.logits_rows.flatten()])

    def draft_grid(
        self,
        features: Tensor,
        *,
        token_ids: Tensor,
        feature_rows: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        logits_rows: Tensor,
    ) -> dict[str, Tensor]:
        """As `draft`, for one grid in fixed buffers, with everything derived made inside (a graph can capture it).

        Args:
            features: [num_rows, n_aux * H_t].
            token_ids: [num_seqs * width] int64.
            feature_rows: [num_seqs * width] int64, `num_rows` for mask slots and padding.
            positions: [num_seqs, width] int64.
            slot_mapping: [num_seqs * width] int64.
            block_tables: [num_seqs, num_blocks] int64.
            logits_rows: [num_seqs, K] int64.
        """
        group = QueryGroup(
            first_row=0,
            positions=positions,
            block_tables=block_tables,
            block_size=self.storage.block_size,
            dtype=self.head.dtype,
        )
        tensors = DraftTensors(
            token_ids=token_ids,
            feature_rows=feature_rows,
            positions=positions.flatten(),
            attention=AttentionMetadata(slot_mapping=slot_mapping, groups=(group,)),
            logits_rows=logits_rows,
        )
        return self.draft(features, tensors)
