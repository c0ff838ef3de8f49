"""Sampling spelled out, one row and one token at a time. The truth that `logits` and `sampler` are compared with.

Slow on purpose. Owns nothing but the definition, down to the order of sums: all tokens are summed in the order of ids,
what top_k leaves in the order of likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from peagle.sampling.batch import SamplingRow
from peagle.sampling.noise import exponential, row_key


def reference_weights(logits: Tensor, row: SamplingRow) -> list[float]:
    """Unnormalised target distribution of one row of logits [V] that is not greedy."""
    params = row.params
    temperature = (
        torch.tensor(params.temperature, dtype=torch.float64).to(logits.dtype).clamp_min(torch.finfo(logits.dtype).tiny)
    )
    weights: list[float] = ((logits - logits.max()) / temperature).exp().double().tolist()
    values = logits.tolist()
    ranking = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    total = _running_sum(weights)
    if params.top_k > 0:
        ranking = ranking[: params.top_k]
        total = _running_sum(weights[token_id] for token_id in ranking)
    kept = set()
    before = 0.0
    for token_id in ranking:
        if before < params.top_p * total or params.top_p >= 1.0:
            kept.add(token_id)
        before += weights[token_id]
    return [weight if token_id in kept else 0.0 for token_id, weight in enumerate(weights)]


def reference_probs(logits: Tensor, row: SamplingRow) -> list[float]:
    """Target distribution of one row of logits [V]."""
    if row.params.is_greedy:
        best = _argmax(logits)
        return [1.0 if token_id == best else 0.0 for token_id in range(len(logits))]
    weights = reference_weights(logits, row)
    total = _running_sum(weights)
    return [weight / total for weight in weights]


def reference_sample(logits: Tensor, row: SamplingRow) -> int | None:
    """The token of one row of logits [V]; None if there is no distribution to draw from."""
    if not math.isfinite(float(logits.max())):
        return None
    if row.params.is_greedy:
        return _argmax(logits)
    weights = reference_weights(logits, row)
    key = row_key(row.seed, row.position)
    return max(range(len(weights)), key=lambda token_id: (weights[token_id] / exponential(key, token_id), -token_id))


def _argmax(logits: Tensor) -> int:
    values = logits.tolist()
    return max(range(len(values)), key=lambda token_id: (values[token_id], -token_id))


def _running_sum(values: Iterable[float]) -> float:
    total = 0.0  # a loop, because `sum` compensates its rounding from Python 3.12 on
    for value in values:
        total += value
    return total
