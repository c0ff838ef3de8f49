"""The passes of an EAGLE-3 head at fixed shapes: decoding steps take in [B, K + 1] and go on at [B, 1].

Owns the choice of the shapes and the fixed buffers. Refuses to know slots and features; steps with chunks of prefills
have no fixed shape, and their first pass runs as it comes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from peagle.cuda_graphs.buffers import BufferSpec, StaticBuffers, Values
from peagle.cuda_graphs.graph_runner import GraphRunner
from peagle.drafter.eagle3_passes import Eagle3Passes, NextShape, NextSlots, PassOutput
from peagle.drafter.inputs import DraftInputs, DraftShape
from peagle.drafter.interface import DraftBatch
from peagle.runner.graphed_drafter import DraftGraphShape
from peagle.runner.input_batch import PaddingPolicy
from peagle.runner.tree_rows import draft_depths
from peagle.stats import GraphStats


class GraphedPasses:
    """See `Passes`.

    Args:
        passes: do the work.
        padding: how decoding grids are padded; the same as the target's.
        num_speculative_tokens: K, at least 1.
        capture: capture CUDA graphs.
    """

    def __init__(
        self, passes: Eagle3Passes, *, padding: PaddingPolicy, num_speculative_tokens: int, capture: bool
    ) -> None:
        self._passes = passes
        self._padding = padding
        self._num_speculative_tokens = num_speculative_tokens
        self._graphs: GraphRunner[DraftGraphShape | NextShape] = GraphRunner(
            self._run_grid, self._make_buffers(), capture=capture
        )

    @property
    def graph_stats(self) -> GraphStats:
        """How passes ran: replayed, captured, or eagerly. Counts on."""
        return self._graphs.stats

    def first(self, batch: DraftBatch) -> tuple[DraftInputs, PassOutput]:
        """See `Passes`."""
        shape = self._fixed_shape(batch)
        if shape is None:
            self._graphs.stats.eager += 1
            return self._passes.first(batch)
        inputs = self._passes.lay_out(batch, shape.grid)
        grid = inputs.grids[0]
        outputs = self._graphs.run(
            shape,
            {
                "features": batch.features,
                "token_ids": inputs.token_ids,
                "feature_rows": inputs.feature_rows,
                "positions": grid.positions,
                "slot_mapping": inputs.slot_mapping,
                "block_tables": grid.block_tables,
                "newest": inputs.logits_rows[:, 0],
            },
        )
        return inputs, PassOutput(**outputs)

    def next_shape(self, num_seqs: int, num_blocks: int) -> NextShape:
        """The next bucket of each."""
        return NextShape(
            self._padding.batch_sizes.round_up(num_seqs), self._padding.draft_block_counts.round_up(num_blocks)
        )

    def further(self, slots: NextSlots) -> PassOutput:
        """See `Passes`."""
        values: dict[str, Values] = {
            "token_ids": slots.token_ids,
            "fed_back": slots.fed_back,
            "positions": slots.positions[:, None],
            "slot_mapping": slots.slot_mapping,
            "block_tables": slots.block_tables,
        }
        return PassOutput(**self._graphs.run(NextShape(*slots.block_tables.shape), values))

    def _run_grid(self, shape: DraftGraphShape | NextShape, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        run = self._passes.further_grid if isinstance(shape, NextShape) else self._passes.first_grid
        output = run(**inputs)
        return {"hidden": output.hidden, "logits": output.logits}

    def _fixed_shape(self, batch: DraftBatch) -> DraftGraphShape | None:
        """The shape of a step in which every sequence decodes; None for any other."""
        if any(not s.is_sampling for s in batch.scheduled):
            return None
        num_slots = [s.num_known_tokens + max(draft_depths(s), default=0) for s in batch.scheduled]  # at most
        widest = self._num_speculative_tokens + 1
        if max(num_slots) > widest:
            return None
        ends = [s.start + num for s, num in zip(batch.scheduled, num_slots, strict=True)]
        grid = DraftShape(
            num_seqs=self._padding.batch_sizes.round_up(len(batch.scheduled)),
            width=max(num_slots) if self._padding.fixed_width is None else widest,
            num_blocks=self._padding.draft_block_counts.round_up(-(-max(ends) // self._passes.storage.block_size)),
        )
        return DraftGraphShape(grid, batch.features.shape[0])

    def _make_buffers(self) -> StaticBuffers:
        num_seqs = self._padding.batch_sizes.sizes[-1]
        width = self._num_speculative_tokens + 1
        head = self._passes.head
        specs = {
            name: BufferSpec((num_seqs * width,), torch.int64)
            for name in ("token_ids", "feature_rows", "positions", "slot_mapping")
        }
        # The target's grid is wider than this drafter's own drafts if others draft more.
        num_feature_rows = num_seqs * max(self._padding.fixed_width or 0, width)
        specs["features"] = BufferSpec((num_feature_rows, head.config.feature_size), head.dtype)
        specs["fed_back"] = BufferSpec((num_seqs, head.config.hidden_size), head.dtype)
        specs["block_tables"] = BufferSpec((num_seqs, self._padding.draft_block_counts.sizes[-1]), torch.int64)
        specs["newest"] = BufferSpec((num_seqs,), torch.int64)
        return StaticBuffers(specs, head.device)
