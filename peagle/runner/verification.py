"""From the logits of a step to what each sequence emits, by rule R1.

Owns the way from scheduled sequences to the rules' padded tensors (`verifier`), and the results' way to the host.
Refuses to know models and caches: which keys are worth keeping follows from a verdict, but is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peagle.drafter.interface import DraftBatch, DraftProposal
from peagle.outputs import NOT_NUMBERS, ScheduledSequence, SequenceOutput
from peagle.runner.tree_rows import draft_depths, draft_parents, is_tree
from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.sampler import SampledTokens, sample
from peagle.verifier.acceptance import VerifyResult, verify
from peagle.verifier.layout import padded_drafts, padded_rows
from peagle.verifier.tree import TokenTrees, verify_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one sequence."""

    output: SequenceOutput
    accepted_nodes: SequenceOf[int] | None = None  # which drafts stand, if they were a tree; None: the first ones


class Verification(Protocol):
    """Decides which drafts stand, and what follows them."""

    def verify(self, sampling: SequenceOf[ScheduledSequence], logits: Tensor) -> dict[int, Verdict]:
        """Verdicts by seq id.

        Args:
            sampling: in the order of their rows.
            logits: [num_rows, vocab_size], 1 + num_draft_tokens rows for each.
        """
        ...

    def remember(self, batch: DraftBatch, proposal: DraftProposal) -> None:
        """Take note of drafts that may be verified in the next step."""
        ...


class MatchVerification:
    """Rule R1, on chains and trees. See `Verification`."""

    def verify(self, sampling: SequenceOf[ScheduledSequence], logits: Tensor) -> dict[int, Verdict]:
        """Sample every row and compare with the drafts."""
        sampled = sample(logits, SamplingMetadata.build(sampling_rows(sampling), device=logits.device))
        if any(is_tree(scheduled) for scheduled in sampling):
            return _match_trees(sampling, sampled)
        device = logits.device
        grid = padded_rows([s.num_draft_tokens for s in sampling], device=device)  # [num_sampling, K + 1]
        drafts = padded_drafts([drafts_of(s) for s in sampling], device=device)
        return to_verdicts(sampling, verify(sampled.token_ids[grid], drafts, sampled.is_valid[grid]))

    def remember(self, batch: DraftBatch, proposal: DraftProposal) -> None:
        """It does not matter where drafts come from."""


def sampling_rows(sampling: SequenceOf[ScheduledSequence]) -> list[SamplingRow]:
    """The rows to be verified. All rows of one depth of a tree draw the same position's token, with the same noise."""
    return [
        SamplingRow(params=s.params, seed=s.seed, position=s.start + s.num_known_tokens + depth)
        for s in sampling
        for depth in (0, *draft_depths(s))
    ]


def drafts_of(scheduled: ScheduledSequence) -> SequenceOf[int]:
    """The tokens that were drafted."""
    return scheduled.token_ids[scheduled.num_known_tokens :]


def to_verdicts(sampling: SequenceOf[ScheduledSequence], result: VerifyResult) -> dict[int, Verdict]:
    """Bring a result to the host."""
    accepted = result.num_accepted_tokens.tolist()
    emitted = result.output_token_ids.tolist()
    is_valid = result.is_valid.tolist()
    return {
        scheduled.seq_id: Verdict(
            output=SequenceOutput(
                seq_id=scheduled.seq_id,
                token_ids=emitted[index][: accepted[index] + 1] if is_valid[index] else (),
                num_accepted_tokens=accepted[index] if is_valid[index] else 0,
                error=None if is_valid[index] else NOT_NUMBERS,
            )
        )
        for index, scheduled in enumerate(sampling)
    }


def _match_trees(sampling: SequenceOf[ScheduledSequence], sampled: SampledTokens) -> dict[int, Verdict]:
    """R1 where some drafts are trees; a chain is one too."""
    device = sampled.token_ids.device
    grid = padded_rows([s.num_draft_tokens for s in sampling], device=device)  # [num_sampling, B + 1]
    trees = TokenTrees.build(
        [drafts_of(s) for s in sampling], [list(draft_parents(s)) for s in sampling], device=device
    )
    result = verify_tree(sampled.token_ids[grid], trees, is_valid=sampled.is_valid[grid])
    verdicts = to_verdicts(sampling, result.emitted)
    paths: list[list[int]] = result.accepted_nodes.tolist()
    return {
        scheduled.seq_id: Verdict(
            output=(output := verdicts[scheduled.seq_id].output),
            accepted_nodes=path[: output.num_accepted_tokens],
        )
        for scheduled, path in zip(sampling, paths, strict=True)
    }
