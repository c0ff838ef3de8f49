"""Verification of drafts that were drawn at random, by R2 or R3, for which their distributions must be known.

Owns the distributions between steps: those of the last proposal, on the device, by sequence. They are of use only for
the very drafts that were drawn from them; a draft that comes from elsewhere, or whose distribution is gone, is judged
as a certain one, which is lossless too. Refuses to know how drafts are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafter.interface import NO_TOKEN, DraftBatch, DraftProposal
from peagle.outputs import ScheduledSequence
from peagle.runner.row_logprobs import AnswerLogprobs
from peagle.runner.verdict import Verdict
from peagle.runner.verification import drafts_of, sampling_rows, to_verdicts
from peagle.sampling.adjustments import adjusted
from peagle.sampling.batch import SamplingMetadata
from peagle.sampling.logits import target_probs
from peagle.spec_config import RejectionSampleMethod
from peagle.verifier.acceptance import VerifyResult
from peagle.verifier.block import verify_block
from peagle.verifier.chain import ChainNoise, DrawnChains
from peagle.verifier.layout import padded_drafts, padded_rows
from peagle.verifier.rejection import verify_standard

Rule = Callable[..., VerifyResult]
_RULES: dict[RejectionSampleMethod, Rule] = {"standard": verify_standard, "block": verify_block}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Drawn:
    """Drafts of one sequence, and what they were drawn from."""

    position: int  # of the first draft
    token_ids: list[int]
    probs: Tensor  # [K, V]


class DrawnVerification:
    """See `Verification`. Drafts must be chains.

    Args:
        method: the rule.
        logprobs: finds those of the tokens that stand.
    """

    def __init__(self, method: RejectionSampleMethod, logprobs: AnswerLogprobs | None = None) -> None:
        self._rule = _RULES[method]
        self._logprobs = logprobs or AnswerLogprobs()
        self._drawn: dict[int, _Drawn] = {}  # by seq id, of the last step alone

    def verify(self, sampling: SequenceOf[ScheduledSequence], logits: Tensor) -> dict[int, Verdict]:
        """See `Verification`."""
        assert all(s.draft_parents is None for s in sampling), "R2 and R3 judge chains"
        rows = sampling_rows(sampling)
        drawn_from = adjusted(logits, rows)
        metadata = SamplingMetadata.build(rows, device=logits.device)
        num_drafts = [s.num_draft_tokens for s in sampling]
        grid = padded_rows(num_drafts, device=logits.device)  # [num_sampling, K + 1]
        chains = DrawnChains(
            target_probs=target_probs(drawn_from, metadata)[grid],
            draft_token_ids=padded_drafts([drafts_of(s) for s in sampling], device=logits.device),
            draft_probs=self._draft_probs(sampling, logits),
        )
        noise = ChainNoise.build(
            [s.seed for s in sampling],
            [s.start + s.num_known_tokens for s in sampling],
            num_drafts=max(num_drafts),
            device=logits.device,
        )
        is_valid = drawn_from.amax(-1).isfinite()[grid]
        verdicts = to_verdicts(sampling, self._rule(chains, noise, is_valid=is_valid))
        return self._logprobs.attach(sampling, verdicts, raw=logits, adjusted=drawn_from, rows=rows)

    def remember(self, batch: DraftBatch, proposal: DraftProposal) -> None:
        """Keep what the next step's drafts were drawn from."""
        self._drawn = {}
        if proposal.draft_probs is None:
            return
        for row, (index, token_ids) in enumerate(zip(proposal.indices, proposal.draft_token_ids.tolist(), strict=True)):
            scheduled = batch.scheduled[index]
            self._drawn[scheduled.seq_id] = _Drawn(
                position=scheduled.start + scheduled.num_known_tokens + len(batch.output_token_ids[index]),
                token_ids=[token_id for token_id in token_ids if token_id != NO_TOKEN],
                probs=proposal.draft_probs[row],
            )

    def _draft_probs(self, sampling: SequenceOf[ScheduledSequence], logits: Tensor) -> Tensor:
        """q of each draft, [num_sampling, K, V]; zero where it is not known."""
        width = max(s.num_draft_tokens for s in sampling)
        probs = logits.new_zeros(len(sampling), width, logits.shape[1], dtype=torch.float64)
        for row, scheduled in enumerate(sampling):
            drawn = self._drawn.get(scheduled.seq_id)
            num = scheduled.num_draft_tokens
            if drawn is None or not num or not _is_drawn(scheduled, drawn):
                continue
            probs[row, :num] = drawn.probs[:num]
        return probs


def _is_drawn(scheduled: ScheduledSequence, drawn: _Drawn) -> bool:
    """Whether the drafts are those that were drawn, or the first of them.

    How many are verified does not depend on what they are (`drafter.drawn_choice`), so the first ones are distributed
    as if no others had been drawn.
    """
    position = scheduled.start + scheduled.num_known_tokens
    return drawn.position == position and list(drafts_of(scheduled)) == drawn.token_ids[: scheduled.num_draft_tokens]
