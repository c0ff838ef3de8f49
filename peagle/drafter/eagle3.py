"""The EAGLE-3 drafter: one token after the other, each from a pass of its own over one more slot.

The first pass takes in every committed token of a step with its real feature, as in `peagle`, and gives the first
draft. A further pass has one slot for each sequence: the last draft, and the head's own hidden state in place of a
feature (arXiv 2503.01840). Keys and values of those slots are placeholders: the next step writes the slots again from
real tokens and features before any row can see them.

Owns the head, the pool and the passes. Refuses to know who owns which block, and never writes to a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from peagle.attention.backend import AttentionBackend
from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.drafter.head import DraftHead
from peagle.drafter.inputs import DraftInputs, IntArray, SlotGrid, SlotRules, build_inputs
from peagle.drafter.interface import NO_TOKEN, DraftBatch, DraftProposal
from peagle.drafter.turn_choice import LikeliestTurn, Turn, TurnChoice
from peagle.kv_cache.storage import KVStorage

_ANY_TOKEN = 0  # of padding, which nobody reads


class Eagle3Drafter:
    """See `Drafter`.

    Args:
        head: loaded, without a mask, and packed if it is to be.
        attention: backend for the head's layers.
        num_speculative_tokens: K, at least 1.
        storage: pool of the head's keys and values, of `peagle.kv_geometry` and `head.config.num_hidden_layers` layers.
        max_model_len: positions from here on are never drafted.
        choice: which token is drafted; None: the likeliest.
    """

    def __init__(
        self,
        *,
        head: DraftHead,
        attention: AttentionBackend,
        num_speculative_tokens: int,
        storage: KVStorage,
        max_model_len: int,
        choice: TurnChoice | None = None,
    ) -> None:
        assert num_speculative_tokens >= 1
        assert not head.is_parallel
        assert len(storage.layers) == head.config.num_hidden_layers
        self.head = head
        self.storage = storage
        self.num_speculative_tokens = num_speculative_tokens
        self.num_mask_slots = num_speculative_tokens - 1  # slots of drafts, not of masks, but as many
        self.num_layers = head.config.num_hidden_layers
        self.aux_layer_ids = head.config.aux_layer_ids
        self._attention = attention
        self._choice = choice or LikeliestTurn(head)
        self._rules = SlotRules(
            num_speculative_tokens=1,  # of the first pass, which has no slots for drafts
            mask_token_id=_ANY_TOKEN,
            block_size=storage.block_size,
            null_slot=storage.null_slot,
            max_model_len=max_model_len,
        )

    @torch.no_grad()
    def propose(self, batch: DraftBatch) -> DraftProposal:
        """Take in every committed token of the step, and draft for the sequences with `max_next_drafts` > 0."""
        inputs = build_inputs(batch, self._rules)
        newest = self._take_in(batch.features, inputs)  # [D, H]
        if not inputs.drafting:
            empty = torch.empty(0, self.num_speculative_tokens, dtype=torch.int64, device=self.head.device)
            return DraftProposal(indices=(), draft_token_ids=empty)
        return self._draft(batch, inputs, newest)

    def _take_in(self, features: Tensor, inputs: DraftInputs) -> Tensor:
        """The first pass: hidden states of the newest slots that draft, [D, H]."""
        if not len(inputs.token_ids):
            return self.head.embed_tokens.weight.new_empty(0, self.head.config.hidden_size)
        # A target row that is not finite fails its own request; its NaN must not stay in blocks that others get later.
        fused = self.head.fuse(features).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        fused = torch.cat([fused, fused.new_zeros(1, fused.shape[1])])  # the row of padding
        hidden = self._forward(
            self._to_device(inputs.token_ids),
            fused[self._to_device(inputs.feature_rows)],
            slot_mapping=inputs.slot_mapping,
            grids=inputs.grids,
        )
        return hidden[self._to_device(inputs.logits_rows[:, 0])]

    def _draft(self, batch: DraftBatch, inputs: DraftInputs, newest: Tensor) -> DraftProposal:
        """Draft depth by depth, at each for the sequences that want so many.

        Args:
            batch: the step.
            inputs: of the first pass.
            newest: hidden states of the newest slots, [D, H].
        """
        positions = np.concatenate([grid.positions.ravel() for grid in inputs.grids])[inputs.logits_rows[:, 0]]  # [D]
        counts = self._num_drafts(batch, inputs, positions)
        rows = np.arange(len(counts))  # those of the D sequences that still draft
        hidden, turns = newest, list[tuple[IntArray, Turn]]()
        for depth in range(int(counts.max())):
            if depth:
                goes_on = counts[rows] > depth
                rows, kept = rows[goes_on], self._to_device(np.flatnonzero(goes_on))
                seqs = [inputs.drafting[row] for row in rows]
                token_ids = turns[-1][1].token_ids[kept]
                feature = self.head.feed_back(hidden[kept])
                hidden = self._extend(batch, seqs, token_ids, feature, positions=positions[rows] + depth)
            seqs = [inputs.drafting[row] for row in rows]
            turns.append((rows, self._choice.choose(batch, seqs, self.head.logits(hidden), depth=depth)))
        return self._to_proposal(inputs.drafting, turns)

    def _num_drafts(self, batch: DraftBatch, inputs: DraftInputs, positions: IntArray) -> IntArray:
        """Drafts of each drafting sequence: none of its slots lies past the context."""
        asked = np.array([batch.scheduled[index].max_next_drafts for index in inputs.drafting], dtype=np.int64)
        return np.minimum(np.minimum(asked, self.num_speculative_tokens), self._rules.max_model_len - positions)

    def _extend(
        self, batch: DraftBatch, seqs: Sequence[int], token_ids: Tensor, feature: Tensor, *, positions: IntArray
    ) -> Tensor:
        """One more slot for some sequences: hidden states [len(seqs), H].

        Args:
            batch: the step.
            seqs: entries of `batch.scheduled`.
            token_ids: drafts that the slots hold, [len(seqs)].
            feature: what stands for the slots' features, [len(seqs), H].
            positions: of the slots, [len(seqs)].
        """
        size = self.storage.block_size
        num_blocks = positions // size + 1
        block_tables = np.full((len(seqs), num_blocks.max()), self.storage.null_slot // size, dtype=np.int64)
        for row, index in enumerate(seqs):
            table = batch.scheduled[index].drafter_block_table
            assert num_blocks[row] <= len(table), "a slot has no block"
            block_tables[row, : num_blocks[row]] = table[: num_blocks[row]]
        blocks = block_tables[np.arange(len(seqs)), num_blocks - 1]
        grid = SlotGrid(first_row=0, positions=positions[:, None], block_tables=block_tables)
        return self._forward(token_ids, feature, slot_mapping=blocks * size + positions % size, grids=(grid,))

    def _forward(
        self, token_ids: Tensor, fused: Tensor, *, slot_mapping: IntArray, grids: Sequence[SlotGrid]
    ) -> Tensor:
        """A pass of the head over slots in the order of their grids, which writes their keys and values: [T, H]."""
        metadata = AttentionMetadata(
            slot_mapping=self._to_device(slot_mapping), groups=tuple(self._query_group(grid) for grid in grids)
        )
        positions = self._to_device(np.concatenate([grid.positions.ravel() for grid in grids]))

        def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self.storage.layers[layer_index]
            return self._attention(query, key, value, cache, metadata, scaling=self.head.scaling)

        hidden: Tensor = self.head(token_ids, fused, positions, attend)
        return hidden

    def _to_proposal(self, indices: tuple[int, ...], turns: Sequence[tuple[IntArray, Turn]]) -> DraftProposal:
        first = turns[0][1]
        shape = (len(indices), self.num_speculative_tokens)
        token_ids = first.token_ids.new_full(shape, NO_TOKEN)
        confidences = first.confidences.new_zeros(shape)
        probs = None if first.probs is None else first.probs.new_zeros(*shape, first.probs.shape[-1])
        for depth, (rows, turn) in enumerate(turns):
            at = self._to_device(rows)
            token_ids[at, depth] = turn.token_ids
            confidences[at, depth] = turn.confidences
            if probs is not None and turn.probs is not None:
                probs[at, depth] = turn.probs
        return DraftProposal(indices=indices, draft_token_ids=token_ids, confidences=confidences, draft_probs=probs)

    def _query_group(self, grid: SlotGrid) -> QueryGroup:
        return QueryGroup(
            first_row=grid.first_row,
            positions=self._to_device(grid.positions),
            block_tables=self._to_device(grid.block_tables),
            block_size=self.storage.block_size,
            dtype=self.head.dtype,
        )

    def _to_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.head.device, non_blocking=True)
