"""Sampling spelled out, one row and one token at a time. The truth that the rest of the package is compared with.

Slow on purpose. Owns nothing but the definition, down to the order of sums: all tokens are summed in the order of ids,
what top_k leaves in the order of likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from peagle.sampling.batch import SamplingRow
from peagle.sampling.context import RowContext
from peagle.sampling.noise import exponential, row_key


def reference_adjusted(logits: Tensor, row: SamplingRow) -> Tensor:
    """Logits [V], float32 or float64, after bias, penalties and masks."""
    if row.context is None:
        return logits
    return _reference_masked(_reference_penalised(logits, row.context), row.context)


def reference_weights(logits: Tensor, row: SamplingRow) -> list[float]:
    """Unnormalised target distribution of one row of logits [V] that is not greedy."""
    params = row.params
    temperature = (
        torch.tensor(params.temperature, dtype=torch.float64).to(logits.dtype).clamp_min(torch.finfo(logits.dtype).tiny)
    )
    weights: list[float] = ((logits - logits.max()) / temperature).exp().double().tolist()
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
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


def _reference_penalised(logits: Tensor, context: RowContext) -> Tensor:
    params, sequence = context.sequence.params, context.sequence
    prompt = list(sequence.known_token_ids[: sequence.num_prompt_tokens])
    output = [*sequence.known_token_ids[sequence.num_prompt_tokens :], *context.draft_token_ids]
    bias = dict(params.logit_bias)

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64).to(logits.dtype)

    penalised = []
    for token_id, logit in enumerate(logits):
        value = logit + number(bias[token_id]) if token_id in bias else logit
        if params.has_penalties and token_id in (prompt + output):
            before = value
            repetition = number(params.repetition_penalty)
            value = value / repetition if value > 0 else value * repetition
            value = value - number(params.frequency_penalty) * number(output.count(token_id))
            value = value - number(params.presence_penalty) * number(float(token_id in output))
            if before.isfinite():
                value = value.clamp(-torch.finfo(logits.dtype).max, torch.finfo(logits.dtype).max)
        penalised.append(value)
    return torch.stack(penalised)


def _reference_masked(logits: Tensor, context: RowContext) -> Tensor:
    params, sequence = context.sequence.params, context.sequence
    output = [*sequence.known_token_ids[sequence.num_prompt_tokens :], *context.draft_token_ids]
    everything = set(range(len(logits)))
    masks = []
    if context.allowed_mask is not None:
        words = context.allowed_mask.tolist()
        masks.append({i for i in everything if i < 32 * len(words) and words[i // 32] >> i % 32 & 1})
    if params.allowed_token_ids is not None:
        masks.append(everything & params.allowed_token_ids)
    bad = {word[-1] for word in params.bad_words if [*output, word[-1]][-len(word) :] == list(word)}
    masks.append(everything - bad)
    if len(output) < params.min_tokens:
        masks.append(everything - sequence.end_token_ids)
    kept = everything
    for mask in masks:
        kept = kept & mask or kept
    return torch.stack([logit if i in kept else torch.full_like(logit, -torch.inf) for i, logit in enumerate(logits)])


def _argmax(logits: Tensor) -> int:
    values = logits.tolist()
    return max(range(len(values)), key=lambda token_id: (values[token_id], -token_id))


def _running_sum(values: Iterable[float]) -> float:
    total = 0.0  # a loop, because `sum` compensates its rounding from Python 3.12 on
    for value in values:
        total += value
    return total
