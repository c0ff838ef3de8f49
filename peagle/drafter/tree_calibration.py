"""How often a candidate of some depth and rank is accepted, as measured while serving.

A head's own probabilities are too sure of themselves at greater depth, since they do not know which token was drafted
before; a tree built on them goes deep where it should go wide. The measured rate of (depth, rank) has no such bias.

Owns the counts. Refuses to know how trees are made of its scores (`tree`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from peagle.errors import ConfigError

Table = list[list[float]]  # [depth][rank]


def geometric_prior(*, max_depth: int, max_rank: int, first: float = 0.6, falloff: float = 0.3) -> Table:
    """The same rates at every depth: `first` for the first rank, and for each further one `falloff` of the one before.

    The defaults leave 14 % to tokens that are no candidates; 60 % is what released heads reach at any depth.
    """
    return [[first * falloff**rank for rank in range(max_rank)] for _ in range(max_depth)]


class TreeCalibration:
    """Acceptance by (depth, rank), given that everything before was accepted. Recent steps count for more.

    Args:
        prior: rates to begin with, [depth][rank], each between 0 and 1, exclusively.
        prior_weight: how many observations the prior is worth; it never fades, so that a rate never becomes 0.
        decay: what a step still counts for after one more that reached the same depth.
    """

    def __init__(self, prior: Sequence[Sequence[float]], *, prior_weight: float = 16.0, decay: float = 0.995) -> None:
        if not all(0.0 < rate < 1.0 for row in prior for rate in row):
            raise ConfigError("prior rates of a draft tree must lie between 0 and 1, exclusively")
        if prior_weight <= 0.0:
            raise ConfigError(f"prior_weight must be above 0, not {prior_weight}")
        if not 0.0 < decay <= 1.0:
            raise ConfigError(f"decay must be above 0 and at most 1, not {decay}")
        self._prior = [list(row) for row in prior]
        self._prior_weight = prior_weight
        self._decay = decay
        self._num_trials = [[0.0] * len(row) for row in prior]
        self._num_accepted = [[0.0] * len(row) for row in prior]

    def observe(self, candidate_token_ids: Sequence[Sequence[int]], output_token_ids: Sequence[int]) -> None:
        """Take in a verified step.

        The target's token after each accepted prefix says of every candidate whether it would have been accepted, also
        of those that found no place in the tree. So a rank that was never drafted is not forgotten.

        Args:
            candidate_token_ids: the head's ranking of tokens, [depth][rank], no larger than the prior.
            output_token_ids: what was emitted: the accepted drafts, then one more token.
        """
        for depth, (candidates, token_id) in enumerate(zip(candidate_token_ids, output_token_ids, strict=False)):
            trials, accepted = self._num_trials[depth], self._num_accepted[depth]
            for rank, candidate in enumerate(candidates):
                trials[rank] = trials[rank] * self._decay + 1.0
                accepted[rank] = accepted[rank] * self._decay + float(candidate == token_id)

    def rates(self) -> Table:
        """Probability that a candidate is accepted if its parent is, [depth][rank]."""
        return [[self._rate(depth, rank) for rank in range(len(row))] for depth, row in enumerate(self._prior)]

    def scores(self) -> Table:
        """Logarithms of the rates, as `best_first_tree` wants them."""
        return [[math.log(rate) for rate in row] for row in self.rates()]

    def _rate(self, depth: int, rank: int) -> float:
        believed = self._prior[depth][rank] * self._prior_weight
        weight = self._prior_weight + self._num_trials[depth][rank]
        return (believed + self._num_accepted[depth][rank]) / weight
