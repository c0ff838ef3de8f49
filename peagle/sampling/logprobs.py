"""How likely tokens are: log probabilities, ranks and the most likely alternatives, each row on its own.

The sum under the logarithm is a running sum in float64, as in `logits`, so a row's result is the same to the last bit
whatever else is computed with it. Tokens that are equally likely are ranked by id, lowest first.

Owns the arithmetic. Refuses to know sequences, and which rows are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.outputs import TokenLogprobs
from peagle.sampling.batch import SamplingMetadata
from peagle.sampling.logits import at_least_float32, sampled_candidates


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The log probability of one token in each row, and its company.

    Args:
        logits: [R, V], any float type, finite somewhere in each row; -inf for tokens without probability.
        token_ids: R tokens.
        num_top: how many alternatives each row gets.
    """
    if not token_ids:
        return []
    logits = at_least_float32(logits)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]  # [R, 1]
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp_().double().cumsum(-1)[:, -1:].log()  # [R, 1]

    def logprob(values: Tensor) -> Tensor:
        return values.double() - largest.double() - total

    value = logits.gather(1, chosen)
    is_lower_id = torch.arange(logits.shape[1], device=logits.device) < chosen
    rank = 1 + ((logits > value) | ((logits == value) & is_lower_id)).sum(1)
    best = _most_likely(logits, min(max(num_top), logits.shape[1]))  # [R, most]
    columns = zip(
        token_ids,
        logprob(value).squeeze(1).tolist(),
        rank.tolist(),
        best.tolist(),
        logprob(logits.gather(1, best)).tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=own,
            rank=place,
            top=tuple(pair for pair in list(zip(ids, values, strict=True))[:count] if pair[1] > -torch.inf),
        )
        for token_id, own, place, ids, values, count in columns
    ]


def processed_logits(adjusted: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Logarithms of what tokens are drawn from, [R, V], up to a constant in each row.

    A greedy row's are its adjusted logits: how likely its tokens would be at temperature 1.

    Args:
        adjusted: [R, V], see `adjustments`.
        metadata: R rows.
    """
    result = at_least_float32(adjusted).double()
    for candidates in sampled_candidates(adjusted, metadata):
        logs = candidates.weights.log()
        if candidates.token_ids is not None:
            every = torch.full_like(result[candidates.rows], -torch.inf)
            logs = every.scatter_(1, candidates.token_ids, logs)
        result = result.index_copy(0, candidates.rows, logs)
    return result


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits of each row, [R, count], largest first, lowest ids first among equal ones."""
    if count == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    found = torch.sort(logits.topk(count, sorted=False).indices, dim=-1).values
    values = torch.sort(logits.gather(1, found), dim=-1, descending=True, stable=True)
    ids = found.gather(1, values.indices)
    # `topk` promises nothing about ties; where one that it left out equals the last one found, sort everything.
    is_tied = (logits >= values.values[:, -1:]).sum(1) > count
    if bool(is_tied.any()):
        ids[is_tied] = torch.sort(logits[is_tied], dim=-1, descending=True, stable=True).indices[:, :count]
    return ids
