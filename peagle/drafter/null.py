"""The drafter of plain decoding: K = 0, proposes nothing, keeps nothing, reads no features."""

from __future__ import annotations

import torch

from peagle.drafter.interface import DraftBatch, DraftProposal


class NullDrafter:
    """See `Drafter`."""

    num_speculative_tokens = 0
    num_mask_slots = 0
    num_layers = 0
    aux_layer_ids: tuple[int, ...] = ()

    def propose(self, batch: DraftBatch) -> DraftProposal:
        """No drafts for any sequence."""
        return DraftProposal(indices=(), draft_token_ids=torch.empty(0, 0, dtype=torch.int64))
