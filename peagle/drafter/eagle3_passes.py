"""The two kinds of passes of a head that drafts one token after the other.

The first takes in every committed token of a step with its real feature. A further one has one slot for each sequence:
its last draft, and the head's own hidden state in place of a feature (arXiv 2503.01840). Owns the head's forward and
its pool. Refuses to know how many passes there are, and what is drafted (`eagle3`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peagle.attention.backend import AttentionBackend
from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.drafter.draft_tensors import to_device, to_tensors
from peagle.drafter.head import DraftHead
from peagle.drafter.inputs import DraftInputs, DraftShape, IntArray, SlotRules, build_inputs
from peagle.drafter.interface import DraftBatch
from peagle.kv_cache.storage import KVStorage

_ANY_TOKEN = 0  # of padding, which nobody reads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassOutput:
    """What a draft follows from, for each sequence (S of them; padding comes last)."""

    hidden: Tensor  # [S, H]
    logits: Tensor  # [S, V_d]


@dataclass(frozen=True, slots=True)
class NextShape:
    """Of a further pass."""

    num_seqs: int
    num_blocks: int  # columns of the block table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NextSlots:
    """One more slot for each of S sequences, padded to a shape."""

    token_ids: Tensor  # [S] int64, the drafts that the slots hold
    fed_back: Tensor  # [S, H], what stands for the slots' features
    positions: IntArray  # [S]
    slot_mapping: IntArray  # [S]
    block_tables: IntArray  # [S, num_blocks]


class Passes(Protocol):
    """How passes run: as they come, or at fixed shapes."""

    def first(self, batch: DraftBatch) -> tuple[DraftInputs, PassOutput]:
        """Take in the committed tokens of a step: the layout, and what each of its D drafting sequences drafts from.

        `PassOutput` may have padding behind the D sequences.
        """
        ...

    def next_shape(self, num_seqs: int, num_blocks: int) -> NextShape:
        """What a further pass of so many sequences has to be padded to."""
        ...

    def further(self, slots: NextSlots) -> PassOutput:
        """A further pass, at a shape of `next_shape`."""
        ...


class Eagle3Passes:
    """Passes as they come. See `Passes`.

    Args:
        head: loaded, without a mask, and packed if it is to be.
        attention: backend for the head's layers.
        storage: pool of the head's keys and values, of `peagle.kv_geometry` and `head.config.num_hidden_layers` layers.
        max_model_len: positions from here on are never drafted.
    """

    def __init__(self, *, head: DraftHead, attention: AttentionBackend, storage: KVStorage, max_model_len: int) -> None:
        assert not head.is_parallel
        assert len(storage.layers) == head.config.num_hidden_layers
        self.head = head
        self.storage = storage
        self.max_model_len = max_model_len
        self._attention = attention
        self._rules = SlotRules(
            num_speculative_tokens=1,  # of the first pass, which has no slots for drafts
            mask_token_id=_ANY_TOKEN,
            block_size=storage.block_size,
            null_slot=storage.null_slot,
            max_model_len=max_model_len,
        )

    def lay_out(self, batch: DraftBatch, shape: DraftShape | None = None) -> DraftInputs:
        """Host side of a first pass; see `build_inputs`."""
        return build_inputs(batch, self._rules, shape)

    def first(self, batch: DraftBatch) -> tuple[DraftInputs, PassOutput]:
        """See `Passes`."""
        inputs = self.lay_out(batch)
        tensors = to_tensors(inputs, block_size=self.storage.block_size, dtype=self.head.dtype, device=self.head.device)
        output = self._first(
            batch.features,
            token_ids=tensors.token_ids,
            feature_rows=tensors.feature_rows,
            positions=tensors.positions,
            attention=tensors.attention,
            newest=tensors.logits_rows[:, 0],
        )
        return inputs, output

    def next_shape(self, num_seqs: int, num_blocks: int) -> NextShape:
        """The same: nothing is padded."""
        return NextShape(num_seqs, num_blocks)

    def further(self, slots: NextSlots) -> PassOutput:
        """See `Passes`."""
        device = self.head.device
        return self.further_grid(
            token_ids=slots.token_ids,
            fed_back=slots.fed_back,
            positions=to_device(slots.positions[:, None], device),
            slot_mapping=to_device(slots.slot_mapping, device),
            block_tables=to_device(slots.block_tables, device),
        )

    def first_grid(
        self,
        features: Tensor,
        *,
        token_ids: Tensor,
        feature_rows: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        newest: Tensor,
    ) -> PassOutput:
        """A first pass over one grid in fixed buffers (a graph can capture it).

        Args:
            features: [num_rows, n_aux * H_t], auxiliary hidden states of the target's rows.
            token_ids: [num_seqs * width] int64.
            feature_rows: [num_seqs * width] int64, `num_rows` for padding.
            positions: [num_seqs, width] int64.
            slot_mapping: [num_seqs * width] int64.
            block_tables: [num_seqs, num_blocks] int64.
            newest: [num_seqs] int64, the row of the newest slot of each sequence that drafts.
        """
        return self._first(
            features,
            token_ids=token_ids,
            feature_rows=feature_rows,
            positions=positions.flatten(),
            attention=self._one_group(slot_mapping, positions, block_tables),
            newest=newest,
        )

    @torch.no_grad()
    def further_grid(
        self, *, token_ids: Tensor, fed_back: Tensor, positions: Tensor, slot_mapping: Tensor, block_tables: Tensor
    ) -> PassOutput:
        """As `further`, with everything on the device; `positions` is [S, 1]."""
        attention = self._one_group(slot_mapping, positions, block_tables)
        hidden = self._forward(token_ids, fed_back, positions.flatten(), attention)
        return PassOutput(hidden=hidden, logits=self.head.logits(hidden))

    @torch.no_grad()
    def _first(
        self,
        features: Tensor,
        *,
        token_ids: Tensor,
        feature_rows: Tensor,
        positions: Tensor,
        attention: AttentionMetadata,
        newest: Tensor,
    ) -> PassOutput:
        if not len(token_ids):
            return self._nothing()
        # A target row that is not finite fails its own request; its NaN must not stay in blocks that others get later.
        fused = self.head.fuse(features).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        fused = torch.cat([fused, fused.new_zeros(1, fused.shape[1])])  # [num_rows + 1, H], the last for padding
        hidden = self._forward(token_ids, fused[feature_rows], positions, attention)
        if not len(newest):
            return self._nothing()
        hidden = hidden[newest]
        return PassOutput(hidden=hidden, logits=self.head.logits(hidden))

    def _forward(self, token_ids: Tensor, fused: Tensor, positions: Tensor, attention: AttentionMetadata) -> Tensor:
        """Slots through the layers, which write their keys and values: [T, H]."""

        def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self.storage.layers[layer_index]
            return self._attention(query, key, value, cache, attention, scaling=self.head.scaling)

        hidden: Tensor = self.head(token_ids, fused, positions, attend)
        return hidden

    def _one_group(self, slot_mapping: Tensor, positions: Tensor, block_tables: Tensor) -> AttentionMetadata:
        group = QueryGroup(
            first_row=0,
            positions=positions,
            block_tables=block_tables,
            block_size=self.storage.block_size,
            dtype=self.head.dtype,
        )
        return AttentionMetadata(slot_mapping=slot_mapping, groups=(group,))

    def _nothing(self) -> PassOutput:
        weight = self.head.embed_tokens.weight
        return PassOutput(
            hidden=weight.new_empty(0, self.head.config.hidden_size),
            logits=weight.new_empty(0, self.head.config.draft_vocab_size),
        )
