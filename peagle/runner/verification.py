"""From the logits of a step to what each sequence emits, by rule R1.

Owns the way from scheduled sequences to the rules' padded tensors (`verifier`), and the results' way to the host.
Refuses to know models and caches: which keys are worth keeping follows from a verdict, but is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from torch import Tensor

from peagle.drafter.interface import DraftBatch, DraftProposal
from peagle.outputs import NOT_NUMBERS, ScheduledSequence, SequenceOutput
from peagle.runner.row_logprobs import AnswerLogprobs
from peagle.runner.tree_rows import draft_depths, draft_parents, is_tree
from peagle.runner.verdict import Verdict
from peagle.sampling.adjustments import adjusted
from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.context import RowContext, SequenceContext
from peagle.sampling.sampler import SampledTokens, sample
from peagle.verifier.acceptance import VerifyResult, verify
from peagle.verifier.layout import padded_drafts, padded_rows
from peagle.verifier.tree import TokenTrees, verify_tree


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
    """Rule R1, on chains and trees. See `Verification`.

    Args:
        logprobs: finds those of the tokens that stand.
    """

    def __init__(self, logprobs: AnswerLogprobs | None = None) -> None:
        self._logprobs = logprobs or AnswerLogprobs()

    def verify(self, sampling: SequenceOf[ScheduledSequence], logits: Tensor) -> dict[int, Verdict]:
        """Sample every row and compare with the drafts."""
        rows = sampling_rows(sampling)
        drawn_from = adjusted(logits, rows)
        sampled = sample(drawn_from, SamplingMetadata.build(rows, device=logits.device))
        match = _match_trees if any(is_tree(scheduled) for scheduled in sampling) else _match_chains
        return self._logprobs.attach(sampling, match(sampling, sampled), raw=logits, adjusted=drawn_from, rows=rows)

    def remember(self, batch: DraftBatch, proposal: DraftProposal) -> None:
        """It does not matter where drafts come from."""


def sampling_rows(sampling: SequenceOf[ScheduledSequence]) -> list[SamplingRow]:
    """The rows to be verified. All rows of one depth of a tree draw the same position's token, with the same noise."""
    rows: list[SamplingRow] = []
    for s in sampling:
        contexts = _contexts(s) if s.params.adjusts_logits or s.row_masks is not None else None
        for row, depth in enumerate((0, *draft_depths(s))):
            rows.append(
                SamplingRow(
                    params=s.params,
                    seed=s.seed,
                    position=s.start + s.num_known_tokens + depth,
                    context=None if contexts is None else contexts[row],
                )
            )
    return rows


def _contexts(scheduled: ScheduledSequence) -> list[RowContext]:
    """What each row to be verified comes after: the known tokens, and the drafts on its own path."""
    sequence = SequenceContext(
        params=scheduled.params,
        known_token_ids=scheduled.known_token_ids[: scheduled.start + scheduled.num_known_tokens],
        num_prompt_tokens=scheduled.num_prompt_tokens,
        end_token_ids=scheduled.eos_token_ids | scheduled.params.stop_token_ids,
    )
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(drafts_of(scheduled), draft_parents(scheduled), strict=True):
        paths.append((*paths[1 + parent], token_id))
    masks = scheduled.row_masks
    return [
        RowContext(sequence=sequence, draft_token_ids=path, allowed_mask=None if masks is None else masks[row])
        for row, path in enumerate(paths)
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


def _match_chains(sampling: SequenceOf[ScheduledSequence], sampled: SampledTokens) -> dict[int, Verdict]:
    """R1 where all drafts are chains."""
    device = sampled.token_ids.device
    grid = padded_rows([s.num_draft_tokens for s in sampling], device=device)  # [num_sampling, K + 1]
    drafts = padded_drafts([drafts_of(s) for s in sampling], device=device)
    return to_verdicts(sampling, verify(sampled.token_ids[grid], drafts, sampled.is_valid[grid]))


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
