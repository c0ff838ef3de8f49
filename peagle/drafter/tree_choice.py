"""Trees of drafts: the best one that a head's rankings offer, for each sequence.

A candidate is worth what two witnesses say. The head knows the context, but is too sure of itself at depth; the table
of measured rates (`tree_calibration`) is right on average, but knows no context. Their geometric mean is the score:
over the candidates of a depth it never sums to more than 1 (Cauchy and Schwarz), and no witness is believed alone.

Owns the scores and what is needed to measure: the candidates of the last step. Refuses to know tree search (`tree`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafter.choice import Picked
from peagle.drafter.head import DraftHead
from peagle.drafter.inputs import DraftInputs
from peagle.drafter.interface import NO_TOKEN, DraftBatch, DraftProposal
from peagle.drafter.tree import ROOT, DraftTree, best_first_tree
from peagle.drafter.tree_calibration import Table, TreeCalibration, geometric_prior
from peagle.sampling.logits import at_least_float32
from peagle.spec_config import TreeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """What a head ranked for one sequence."""

    position: int  # of the first draft
    token_ids: list[list[int]]  # [depth][rank]


class TreeChoice:
    """See `DraftChoice`. `num_branches` candidates at each depth, and at most `num_nodes` drafts.

    Args:
        head: whose logits they are.
        spec: the largest tree.
    """

    def __init__(self, head: DraftHead, spec: TreeSpec) -> None:
        self._head = head
        self._spec = spec
        self._num_ranks = min(spec.num_branches, head.config.draft_vocab_size)
        self._calibration = TreeCalibration(geometric_prior(max_depth=spec.depth, max_rank=self._num_ranks))
        self._candidates: dict[int, _Candidates] = {}  # by seq id, of the last step alone

    def max_num_drafts(self, num_depths: int) -> int:
        """The nodes of the largest tree."""
        assert num_depths == self._spec.depth
        return self._spec.num_nodes

    def rates(self) -> Table:
        """Measured acceptance by depth and rank."""
        return self._calibration.rates()

    def pick(self, logits: Tensor) -> dict[str, Tensor]:
        """The likeliest tokens of each depth and their log-probabilities, [S, D, num_ranks]."""
        top = at_least_float32(logits).topk(self._num_ranks, dim=-1)
        log_probs = top.values - at_least_float32(logits).logsumexp(-1, keepdim=True)
        return {"token_ids": self._head.to_target_ids(top.indices), "log_probs": log_probs.clamp_max(0.0)}

    def propose(self, batch: DraftBatch, inputs: DraftInputs, picked: Picked) -> DraftProposal:
        """See `DraftChoice`."""
        self._observe(batch)
        num_drafting = len(inputs.drafting)
        token_ids: list[list[list[int]]] = picked["token_ids"][:num_drafting].tolist()
        log_probs: list[list[list[float]]] = picked["log_probs"][:num_drafting].tolist()
        measured = self._calibration.scores()
        trees = []
        self._candidates = {}
        for row, (index, num_depths) in enumerate(zip(inputs.drafting, inputs.num_drafts, strict=True)):
            scheduled, candidates = batch.scheduled[index], token_ids[row][:num_depths]
            max_num_nodes = min(scheduled.max_next_drafts, self._spec.num_nodes)
            scores = _scores(log_probs[row][:num_depths], measured)
            trees.append(best_first_tree(scores, candidates, max_num_nodes=max_num_nodes))
            self._candidates[scheduled.seq_id] = _Candidates(
                position=_next_position(batch, index), token_ids=candidates
            )
        return _to_proposal(inputs.drafting, trees)

    def _observe(self, batch: DraftBatch) -> None:
        """Compare the last step's candidates with what the target said in their place."""
        for scheduled, emitted in zip(batch.scheduled, batch.output_token_ids, strict=True):
            candidates = self._candidates.get(scheduled.seq_id)
            position = scheduled.start + scheduled.num_known_tokens
            if candidates is not None and emitted and candidates.position == position:
                self._calibration.observe(candidates.token_ids, emitted)


def _next_position(batch: DraftBatch, index: int) -> int:
    """Where the first draft for the next step stands."""
    scheduled = batch.scheduled[index]
    return scheduled.start + scheduled.num_known_tokens + len(batch.output_token_ids[index])


def _scores(log_probs: list[list[float]], measured: Table) -> Table:
    """Log-probability of each candidate if its parent is accepted, [depth][rank], for the depths of `log_probs`."""
    return [
        [(by_head + by_table) / 2 for by_head, by_table in zip(*rows, strict=True)]
        for rows in zip(log_probs, measured, strict=False)
    ]


def _to_proposal(indices: tuple[int, ...], trees: list[DraftTree]) -> DraftProposal:
    width = max((tree.num_nodes for tree in trees), default=0)
    token_ids = torch.full((len(trees), width), NO_TOKEN, dtype=torch.int64)
    confidences = torch.zeros(len(trees), width)
    for row, tree in enumerate(trees):
        token_ids[row, : tree.num_nodes] = torch.tensor(tree.token_ids, dtype=torch.int64)
        confidences[row, : tree.num_nodes] = torch.tensor(_confidences(tree))
    return DraftProposal(
        indices=indices,
        draft_token_ids=token_ids,
        confidences=confidences,
        parents=tuple(tree.parents for tree in trees),
    )


def _confidences(tree: DraftTree) -> list[float]:
    """Probability of each node if its parent is accepted."""
    above = [0.0 if parent == ROOT else tree.scores[parent] for parent in tree.parents]
    return [math.exp(score - before) for score, before in zip(tree.scores, above, strict=True)]
