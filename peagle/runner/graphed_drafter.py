"""The P-EAGLE drafter at fixed shapes: decoding steps draft at [B, 2K] through a graph runner.

Owns the choice of the shape and the fixed buffers. Refuses to know slots and features; steps with chunks of prefills
have no fixed shape and go to the drafter as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.cuda_graphs.buffers import BufferSpec, StaticBuffers
from peagle.cuda_graphs.graph_runner import GraphRunner
from peagle.drafter.inputs import DraftShape
from peagle.drafter.interface import DraftBatch, DraftProposal
from peagle.drafter.peagle import PEagleDrafter
from peagle.runner.input_batch import PaddingPolicy
from peagle.runner.tree_rows import draft_depths
from peagle.stats import GraphStats


@dataclass(frozen=True, slots=True)
class DraftGraphShape:
    """A draft grid, and the rows of the target that its features come from."""

    grid: DraftShape
    num_feature_rows: int


class GraphedDrafter:
    """See `Drafter`.

    Args:
        drafter: does the work.
        padding: how decoding grids are padded; the same as the target's.
        capture: capture CUDA graphs.
    """

    def __init__(self, drafter: PEagleDrafter, *, padding: PaddingPolicy, capture: bool) -> None:
        self._drafter = drafter
        self._padding = padding
        self._block_size = drafter.storage.block_size
        self.num_speculative_tokens = drafter.num_speculative_tokens
        self.num_mask_slots = drafter.num_mask_slots
        self._num_depths = drafter.num_mask_slots + 1
        self.num_layers = drafter.num_layers
        self.aux_layer_ids = drafter.aux_layer_ids
        self._graphs: GraphRunner[DraftGraphShape] = GraphRunner(
            self._draft_grid, self._make_buffers(), capture=capture
        )

    @property
    def graph_stats(self) -> GraphStats:
        """How draft passes ran: replayed, captured, or eagerly. Counts on."""
        return self._graphs.stats

    def propose(self, batch: DraftBatch) -> DraftProposal:
        """Take in every committed token of the step, and draft for the sequences with `max_next_drafts` > 0."""
        shape = self._fixed_shape(batch)
        if shape is None:
            self._graphs.stats.eager += 1
            return self._drafter.propose(batch)
        inputs = self._drafter.lay_out(batch, shape.grid)
        grid = inputs.grids[0]
        picked = self._graphs.run(
            shape,
            {
                "features": batch.features,
                "token_ids": inputs.token_ids,
                "feature_rows": inputs.feature_rows,
                "positions": grid.positions,
                "slot_mapping": inputs.slot_mapping,
                "block_tables": grid.block_tables,
                "logits_rows": inputs.logits_rows,
            },
        )
        return self._drafter.to_proposal(batch, inputs, picked)

    def _draft_grid(self, shape: DraftGraphShape, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._drafter.draft_grid(
            inputs["features"],
            token_ids=inputs["token_ids"],
            feature_rows=inputs["feature_rows"],
            positions=inputs["positions"],
            slot_mapping=inputs["slot_mapping"],
            block_tables=inputs["block_tables"],
            logits_rows=inputs["logits_rows"],
        )

    def _fixed_shape(self, batch: DraftBatch) -> DraftGraphShape | None:
        """The shape of a step in which every sequence decodes; None for any other."""
        num_depths = self._num_depths
        if any(not s.is_sampling for s in batch.scheduled):
            return None
        num_slots = [s.num_known_tokens + max(draft_depths(s), default=0) for s in batch.scheduled]  # at most
        if max(num_slots) > num_depths + 1:
            return None
        width = 2 * num_depths if self._padding.fixed_width is not None else max(num_slots) + num_depths - 1
        ends = [s.start + num + num_depths - 1 for s, num in zip(batch.scheduled, num_slots, strict=True)]
        grid = DraftShape(
            num_seqs=self._padding.batch_sizes.round_up(len(batch.scheduled)),
            width=width,
            num_blocks=self._padding.draft_block_counts.round_up(-(-max(ends) // self._block_size)),
        )
        return DraftGraphShape(grid, batch.features.shape[0])

    def _make_buffers(self) -> StaticBuffers:
        num_seqs = self._padding.batch_sizes.sizes[-1]
        num_rows = num_seqs * 2 * self._num_depths
        # The target's grid is wider than this drafter's own drafts if others draft more.
        num_feature_rows = num_seqs * max(self._padding.fixed_width or 0, self.num_speculative_tokens + 1)
        head = self._drafter.head
        specs = {
            name: BufferSpec((num_rows,), torch.int64)
            for name in ("token_ids", "feature_rows", "positions", "slot_mapping")
        }
        specs["features"] = BufferSpec((num_feature_rows, head.config.feature_size), head.dtype)
        specs["block_tables"] = BufferSpec((num_seqs, self._padding.draft_block_counts.sizes[-1]), torch.int64)
        specs["logits_rows"] = BufferSpec((num_seqs, self._num_depths), torch.int64)
        return StaticBuffers(specs, head.device)
