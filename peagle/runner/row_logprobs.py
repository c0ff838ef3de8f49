"""Log probabilities of what a step said and of the prompt that it read, where requests ask for them.

Owns which rows are looked at and from which logits: the model's own (`raw_logprobs`), or those that tokens are drawn
from (`processed_logprobs`); of a prompt always the model's own. Refuses to know how drafts were judged, and does no
work for requests that do not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from torch import Tensor

from peagle.config import LogprobsMode
from peagle.outputs import ScheduledSequence, TokenLogprobs
from peagle.runner.input_batch import InputBatch
from peagle.runner.verdict import Verdict
from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.logprobs import processed_logits, token_logprobs

_MAX_ROWS = 32  # rows of a prompt that are worked on at once: 6 MB each at a vocabulary of 49,152


class AnswerLogprobs:
    """Log probabilities of the tokens that stand after verification.

    Args:
        mode: which logits are looked at.
    """

    def __init__(self, mode: LogprobsMode = "raw_logprobs") -> None:
        self._mode = mode

    def attach(
        self,
        sampling: SequenceOf[ScheduledSequence],
        verdicts: dict[int, Verdict],
        *,
        raw: Tensor,
        adjusted: Tensor,
        rows: SequenceOf[SamplingRow],
    ) -> dict[int, Verdict]:
        """The verdicts, with `logprobs` of each emitted token where they are asked for.

        Args:
            sampling: in the order of their rows.
            verdicts: by seq id.
            raw: [R, V], the model's logits.
            adjusted: [R, V], see `sampling.adjustments`.
            rows: R rows.
        """
        wanted: list[int] = []
        token_ids: list[int] = []
        num_top: list[int] = []
        spans: dict[int, slice] = {}
        first = 0
        for scheduled in sampling:
            verdict = verdicts[scheduled.seq_id]
            if scheduled.params.logprobs is not None and verdict.output.token_ids:
                said = verdict.output.token_ids
                spans[scheduled.seq_id] = slice(len(wanted), len(wanted) + len(said))
                wanted += [first + row for row in _rows_of(verdict)]
                token_ids += said
                num_top += [scheduled.params.logprobs] * len(said)
            first += 1 + scheduled.num_draft_tokens
        if not wanted:
            return verdicts
        if self._mode == "raw_logprobs":
            logits = raw[wanted]
        else:
            metadata = SamplingMetadata.build([rows[row] for row in wanted], device=raw.device)
            logits = processed_logits(adjusted[wanted], metadata)
        found = token_logprobs(logits, token_ids, num_top)
        return verdicts | {
            seq_id: replace(verdicts[seq_id], output=replace(verdicts[seq_id].output, logprobs=tuple(found[span])))
            for seq_id, span in spans.items()
        }


def prompt_logprobs(
    batch: InputBatch, logits_of: Callable[[list[int]], Tensor]
) -> Mapping[int, tuple[TokenLogprobs, ...]]:
    """Of the prompt's tokens behind this step's known rows, by seq id, where they are asked for.

    Args:
        batch: the step.
        logits_of: the model's logits of rows, [len(rows), V].
    """
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    for scheduled, first in zip(batch.scheduled, batch.first_rows, strict=True):
        if scheduled.params.prompt_logprobs is None:
            continue
        last = min(scheduled.start + scheduled.num_known_tokens, scheduled.num_prompt_tokens - 1)
        token_ids = list(scheduled.known_token_ids[scheduled.start + 1 : last + 1])
        of_prompt: list[TokenLogprobs] = []
        for begin in range(0, len(token_ids), _MAX_ROWS):
            some = token_ids[begin : begin + _MAX_ROWS]
            logits = logits_of(list(range(first + begin, first + begin + len(some))))
            of_prompt += token_logprobs(logits, some, [scheduled.params.prompt_logprobs] * len(some))
        found[scheduled.seq_id] = tuple(of_prompt)
    return found


def _rows_of(verdict: Verdict) -> list[int]:
    """The rows that the emitted tokens came from, counted from the last known row."""
    accepted = verdict.accepted_nodes
    if accepted is None:
        return list(range(len(verdict.output.token_ids)))
    return [0, *(1 + node for node in accepted)]
