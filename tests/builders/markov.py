"""A language model with five tokens whose distributions are known exactly: a token depends on the last one alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.logits import target_probs
from peagle.sampling.noise import Stream, row_key, step_key
from peagle.sampling.race import as_int64, winners
from peagle.sampling_params import SamplingParams
from peagle.verifier.acceptance import VerifyResult
from peagle.verifier.chain import ChainNoise, DrawnChains

VOCAB_SIZE = 5
FIRST_TOKEN = 0

Rule = Callable[[DrawnChains, ChainNoise], VerifyResult]


def random_logits(*shape: int, seed: int, scale: float = 1.5) -> Tensor:
    """Logits of tables, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def probs_of(logits: Tensor, params: SamplingParams, *, min_p: float = 0.0) -> Tensor:
    """Distributions of rows of logits, [R, V] float64, with tokens below `min_p` of the likeliest left out."""
    likely = torch.softmax(logits, -1)
    logits = logits.masked_fill(likely < min_p * likely.amax(-1, keepdim=True), float("-inf"))
    rows = [SamplingRow(params=params, seed=0, position=0)] * len(logits)
    return target_probs(logits, SamplingMetadata.build(rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class MarkovDrafter:
    """Drafts K tokens at once: one distribution for each depth, which depends on the last known token alone.

    `known` are drafts that are not drawn at all: [K, V] tokens by depth and last token, -1 where the draft is drawn.
    Their distribution is reported as `probs` says.
    """

    probs: Tensor  # [K, V, V] by depth and last token
    known: Tensor | None = None  # [K, V] int64
    max_drafts: int | None = None  # sequence n drafts n % (max_drafts + 1) tokens; None for all K

    def propose(self, last: Tensor, seeds: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        """Drafts [N, K] and their distributions [N, K, V]."""
        num_drafts = len(self.probs)
        probs = self.probs[:, last].transpose(0, 1)  # [N, K, V]
        steps = [step_key(seed, position, Stream.DRAFTS) for seed, position in zip(seeds, positions, strict=True)]
        keys = torch.tensor([as_int64(row_key(key, i)) for key in steps for i in range(num_drafts)], dtype=torch.int64)
        drafts = winners(probs.double().reshape(-1, VOCAB_SIZE), keys[:, None], None).view(len(seeds), num_drafts)
        if self.known is not None:
            known = self.known[:, last].T
            drafts = torch.where(known >= 0, known, drafts)
        if self.max_drafts is not None:
            lengths = torch.tensor(seeds) % (self.max_drafts + 1)
            drafts = torch.where(torch.arange(num_drafts) < lengths[:, None], drafts, -1)
        return drafts, probs


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoded:
    """Tokens of many sequences."""

    token_ids: Tensor  # [N, num_tokens]
    num_accepted: Tensor  # [N] int64, accepted drafts of the first step


def decode(table: Tensor, drafter: MarkovDrafter, rule: Rule, *, num_seqs: int, num_tokens: int) -> Decoded:
    """Decode sequences with the seeds 0, 1, ... until all have enough tokens.

    Args:
        table: the target, [V, V].
        drafter: of the drafts.
        rule: that judges them.
        num_seqs: N.
        num_tokens: after the first token, which stands at position 0.
    """
    seeds = list(range(num_seqs))
    rows = torch.arange(num_seqs)
    tokens = torch.full((num_seqs, num_tokens + 2 + 2 * len(drafter.probs)), FIRST_TOKEN)
    lengths = torch.ones(num_seqs, dtype=torch.int64)
    first_accepted: Tensor | None = None
    while int(lengths.min()) <= num_tokens:
        last = tokens[rows, lengths - 1]
        drafts, draft_probs = drafter.propose(last, seeds, lengths.tolist())
        inputs = torch.cat([last[:, None], drafts.clamp_min(0)], 1)
        chains = DrawnChains(target_probs=table[inputs], draft_token_ids=drafts, draft_probs=draft_probs)
        result = rule(chains, ChainNoise.build(seeds, lengths.tolist(), num_drafts=drafts.shape[1]))
        assert result.is_valid.all()
        first_accepted = result.num_accepted_tokens if first_accepted is None else first_accepted
        for column, token_ids in enumerate(result.output_token_ids.T):
            place = (lengths + column).clamp_max(tokens.shape[1] - 1)
            tokens[rows, place] = torch.where(token_ids >= 0, token_ids, tokens[rows, place])
        lengths = (lengths + result.num_accepted_tokens + 1).clamp_max(num_tokens + 1)
    assert first_accepted is not None
    return Decoded(token_ids=tokens[:, 1 : num_tokens + 1], num_accepted=first_accepted)


def count_strings(token_ids: Tensor) -> Tensor:
    """How often each string of tokens came out, [V, V, ...] float64."""
    num_tokens = token_ids.shape[1]
    index = (token_ids * VOCAB_SIZE ** torch.arange(num_tokens - 1, -1, -1)).sum(1)
    counts = torch.bincount(index, minlength=VOCAB_SIZE**num_tokens)
    return counts.view([VOCAB_SIZE] * num_tokens).double()


def exact_strings(table: Tensor, num_tokens: int) -> Tensor:
    """Probability of each string of tokens after the first token, [V, V, ...]."""
    probs = table[FIRST_TOKEN]
    for _ in range(num_tokens - 1):
        probs = probs[..., None] * table
    return probs


def excess(counts: Tensor, probs: Tensor) -> float:
    """Chi-square statistic beyond what is expected, in its standard deviations; infinite for the impossible."""
    expected = probs * counts.sum()
    if float(counts[expected == 0].sum()) > 0:
        return float("inf")
    common = expected >= 3
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    rest, rest_expected = float(counts[~common].sum()), float(expected[~common].sum())
    if rest_expected > 0:
        statistic += (rest - rest_expected) ** 2 / rest_expected
    freedom = int(common.sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)
