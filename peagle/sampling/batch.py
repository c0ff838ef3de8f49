"""What sampling needs to know of each verified row, as tensors for the device and lists for the host.

Owns the translation of `SamplingParams` into one entry a row, and the sorting of rows by the work they ask for, so
that nobody pays for a neighbour's top_k. Refuses to touch logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.sampling.context import RowContext
from peagle.sampling.noise import row_key
from peagle.sampling.race import as_int64
from peagle.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One verified row on the host."""

    params: SamplingParams
    seed: int
    position: int  # absolute position of the token that is drawn: one after the row's own token
    context: RowContext | None = None  # where the logits are adjusted, see `adjustments`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingMetadata:
    """One entry for each verified row (R rows), in the order of the logits.

    The row lists live on the host: they decide which work is launched without asking the device.
    """

    temperature: Tensor  # [R] float64, 0 for greedy rows
    top_k: Tensor  # [R] int64, 0 for all tokens
    top_p: Tensor  # [R] float64
    min_p: Tensor | None  # [R] float64; None if no sampled row has one
    keys: Tensor  # [R] int64, keys of the noise
    plain_rows: tuple[int, ...]  # rows drawn from their whole distribution
    truncated_rows: tuple[int, ...]  # rows drawn from what top_k and top_p leave
    max_top_k: int  # largest top_k of the truncated rows; 0 if none has one
    any_top_p: bool
    any_top_p_alone: bool  # a row has top_p and no top_k: its mass is that of all tokens

    @property
    def num_rows(self) -> int:
        """R."""
        return self.keys.shape[0]

    @property
    def all_greedy(self) -> bool:
        """True if no row needs noise."""
        return not self.plain_rows and not self.truncated_rows

    @property
    def any_top_k(self) -> bool:
        """True if a sampled row has a top_k."""
        return self.max_top_k > 0

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], *, device: torch.device | str = "cpu") -> SamplingMetadata:
        """Metadata of the rows, in their order."""
        params = [row.params for row in rows]
        sampled = [i for i, p in enumerate(params) if not p.is_greedy]
        truncated = tuple(i for i in sampled if _is_truncated(params[i]))
        keys = [0 if row.params.is_greedy else as_int64(row_key(row.seed, row.position)) for row in rows]
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            min_p=(
                torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
                if any(params[i].min_p > 0.0 for i in sampled)
                else None
            ),
            keys=torch.tensor(keys, dtype=torch.int64, device=device),
            plain_rows=tuple(i for i in sampled if not _is_truncated(params[i])),
            truncated_rows=truncated,
            max_top_k=max((params[i].top_k for i in truncated), default=0),
            any_top_p=any(params[i].top_p < 1.0 for i in truncated),
            any_top_p_alone=any(params[i].top_p < 1.0 and params[i].top_k == 0 for i in truncated),
        )


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0
