"""The EAGLE-3 drafter: one token after the other, each from a pass of its own over one more slot (arXiv 2503.01840).

Keys and values of the drafts' slots are placeholders: the next step writes the slots again from real tokens and
features before any row can see them. Owns the turns: who goes on, from which slot, and what is drafted. Refuses to know
how a pass runs (`eagle3_passes`) and who owns which block, and never writes to a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.draft_tensors import flat_positions, to_device
from peagle.drafter.eagle3_passes import Eagle3Passes, NextSlots, Passes, PassOutput
from peagle.drafter.inputs import DraftInputs, IntArray
from peagle.drafter.interface import NO_TOKEN, DraftBatch, DraftProposal
from peagle.drafter.turn_choice import LikeliestTurn, Turn, TurnChoice


class Eagle3Drafter:
    """See `Drafter`.

    Args:
        passes: the head's.
        num_speculative_tokens: K, at least 1.
        choice: which token is drafted; None: the likeliest.
        runs: how the passes run; None: as they come.
    """

    def __init__(
        self,
        passes: Eagle3Passes,
        *,
        num_speculative_tokens: int,
        choice: TurnChoice | None = None,
        runs: Passes | None = None,
    ) -> None:
        assert num_speculative_tokens >= 1
        self.head = passes.head
        self.storage = passes.storage
        self.num_speculative_tokens = num_speculative_tokens
        self.num_mask_slots = num_speculative_tokens - 1  # slots of drafts, not of masks, but as many
        self.num_layers = self.head.config.num_hidden_layers
        self.aux_layer_ids = self.head.config.aux_layer_ids
        self._max_model_len = passes.max_model_len
        self._choice = choice or LikeliestTurn(self.head)
        self._passes = runs or passes

    @torch.no_grad()
    def propose(self, batch: DraftBatch) -> DraftProposal:
        """Take in every committed token of the step, and draft for the sequences with `max_next_drafts` > 0."""
        inputs, first = self._passes.first(batch)
        if not inputs.drafting:
            empty = torch.empty(0, self.num_speculative_tokens, dtype=torch.int64, device=self.head.device)
            return DraftProposal(indices=(), draft_token_ids=empty)
        return self._draft(batch, inputs, first)

    def _draft(self, batch: DraftBatch, inputs: DraftInputs, output: PassOutput) -> DraftProposal:
        """Draft depth by depth, at each for the sequences that want so many.

        Args:
            batch: the step.
            inputs: of the first pass.
            output: of the first pass.
        """
        num_drafting = len(inputs.drafting)
        positions = flat_positions(inputs)[inputs.logits_rows[:num_drafting, 0]]  # [D], of the newest slots
        counts = self._num_drafts(batch, inputs, positions)
        rows = np.arange(num_drafting)  # those of the D sequences that still draft
        turns = list[tuple[IntArray, Turn]]()
        for depth in range(int(counts.max())):
            if depth:
                goes_on = counts[rows] > depth
                rows = rows[goes_on]
                output = self._passes.further(
                    self._next_slots(
                        [batch.scheduled[inputs.drafting[row]].drafter_block_table for row in rows],
                        positions=positions[rows] + depth,
                        kept=np.flatnonzero(goes_on),
                        turn=turns[-1][1],
                        hidden=output.hidden,
                    )
                )
            seqs = [inputs.drafting[row] for row in rows]
            turns.append((rows, self._choice.choose(batch, seqs, output.logits[: len(seqs)], depth=depth)))
        return self._to_proposal(inputs.drafting, turns)

    def _num_drafts(self, batch: DraftBatch, inputs: DraftInputs, positions: IntArray) -> IntArray:
        """Drafts of each drafting sequence: none of its slots lies past the context."""
        asked = np.array([batch.scheduled[index].max_next_drafts for index in inputs.drafting], dtype=np.int64)
        return np.minimum(np.minimum(asked, self.num_speculative_tokens), self._max_model_len - positions)

    def _next_slots(
        self, tables: Sequence[Sequence[int]], *, positions: IntArray, kept: IntArray, turn: Turn, hidden: Tensor
    ) -> NextSlots:
        """One more slot for the S sequences that go on.

        Args:
            tables: of blocks, of each sequence.
            positions: of the slots, [S].
            kept: rows of `turn` and `hidden` that go on, [S].
            turn: the drafts before.
            hidden: the head's states that they came from, [at least D, H].
        """
        size, null_slot = self.storage.block_size, self.storage.null_slot
        num_blocks = positions // size + 1  # [S]
        shape = self._passes.next_shape(len(tables), int(num_blocks.max()))
        block_tables = np.full((shape.num_seqs, shape.num_blocks), null_slot // size, dtype=np.int64)
        for row, table in enumerate(tables):
            assert num_blocks[row] <= len(table), "a slot has no block"
            block_tables[row, : num_blocks[row]] = table[: num_blocks[row]]
        blocks = block_tables[np.arange(len(tables)), num_blocks - 1]
        padding = shape.num_seqs - len(tables)
        at = to_device(np.pad(kept, (0, padding)), self.head.device)
        return NextSlots(
            token_ids=turn.token_ids[at],
            fed_back=self.head.feed_back(hidden[at]),
            positions=np.pad(positions, (0, padding)),
            slot_mapping=np.pad(blocks * size + positions % size, (0, padding), constant_values=null_slot),
            block_tables=block_tables,
        )

    def _to_proposal(self, indices: tuple[int, ...], turns: Sequence[tuple[IntArray, Turn]]) -> DraftProposal:
        first = turns[0][1]
        shape = (len(indices), self.num_speculative_tokens)
        token_ids = first.token_ids.new_full(shape, NO_TOKEN)
        confidences = first.confidences.new_zeros(shape)
        probs = None if first.probs is None else first.probs.new_zeros(*shape, first.probs.shape[-1])
        for depth, (rows, turn) in enumerate(turns):
            at = to_device(rows, self.head.device)
            token_ids[at, depth] = turn.token_ids
            confidences[at, depth] = turn.confidences
            if probs is not None and turn.probs is not None:
                probs[at, depth] = turn.probs
        return DraftProposal(indices=indices, draft_token_ids=token_ids, confidences=confidences, draft_probs=probs)
