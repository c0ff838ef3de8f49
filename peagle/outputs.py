"""The hand-offs between layers, as frozen dataclasses.

scheduler --SchedulerOutput--> runner --ModelRunnerOutput--> scheduler --SequenceCommit--> output processor
--RequestOutput--> client. Owns the shapes of these messages and says who fills each field; holds no logic, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from peagle.sampling_params import SamplingParams
from peagle.sequence import FinishReason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The error of a sequence whose hidden states or logits hold something else.
NOT_NUMBERS = "the model's hidden states or logits are not numbers for this request"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How likely one token was, and what was more likely. Natural logarithms; equally likely tokens by id."""

    token_id: int
    logprob: float  # -inf if `processed_logprobs` gave it no probability
    rank: int  # 1 for the most likely token
    top: tuple[tuple[int, float], ...]  # token id and logprob, most likely first; none without probability


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """What one sequence computes in this step. Filled by the scheduler, read by the runner.

    The rows are the tokens at absolute positions [start, start + len(token_ids)): first known tokens, then
    `num_draft_tokens` drafts. A step *samples* when its last known row is the last known token of the sequence: then
    the 1 + num_draft_tokens last rows are verified. Otherwise it is a chunk of a prefill.
    """

    seq_id: int
    start: int
    token_ids: SequenceOf[int]
    num_draft_tokens: int
    is_sampling: bool
    next_token_id: int | None  # known token after the last row of a chunk; None when the step samples
    max_next_drafts: int  # how many drafts are worth proposing for the next step (0: none)
    block_table: SequenceOf[int]  # target's KV blocks, covering every row
    drafter_block_table: SequenceOf[int]  # drafter's, covering the rows and the mask slots; empty without drafter
    params: SamplingParams
    seed: int
    draft_parents: SequenceOf[int] | None = None  # of each draft, its parent among the drafts (-1: none); None: a chain
    draft_confidences: SequenceOf[float] = ()  # of each draft
    known_token_ids: SequenceOf[int] = ()  # all committed tokens: the sequence's own list, to be read at once
    num_prompt_tokens: int = 0
    predicted_token_ids: SequenceOf[int] = ()  # what the client expects the answer to be
    uses_head: bool = True  # False: the draft head keeps nothing of this sequence, and drafts nothing for it
    eos_token_ids: frozenset[int] = frozenset()  # that end the answer; empty if the request ignores them
    # Tokens that each verified row may draw, one bit a token, lowest bit first: [1 + num_draft_tokens, ceil(V / 32)].
    row_masks: NDArray[np.int32] | None = field(default=None, compare=False)

    @property
    def num_known_tokens(self) -> int:
        """Rows that are not drafts."""
        return len(self.token_ids) - self.num_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's work. Filled by `Scheduler.schedule`. Decoding sequences come before chunks of prefills."""

    scheduled: tuple[ScheduledSequence, ...]
    num_scheduled_tokens: int
    preempted_seq_ids: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if nothing can run now."""
        return not self.scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What the device found for one scheduled sequence. Filled by the runner, in the order of `scheduled`."""

    seq_id: int
    token_ids: SequenceOf[int]  # accepted drafts, then the recovered or bonus token; empty for a chunk
    num_accepted_tokens: int  # accepted drafts alone: len(token_ids) - 1 when sampling, else 0
    draft_token_ids: SequenceOf[int] = ()  # proposals for the next step
    draft_parents: SequenceOf[int] | None = None  # as in `ScheduledSequence`
    # The drafter's own estimate that each draft is accepted; it decides how many are verified, and no token.
    draft_confidences: SequenceOf[float] = field(default=(), compare=False)
    error: str | None = None  # the result is unusable (not numbers, or the step raised); nothing is committed
    logprobs: SequenceOf[TokenLogprobs] = ()  # of each of `token_ids`, where the request asks
    prompt_logprobs: SequenceOf[TokenLogprobs] = ()  # of the prompt's tokens behind the rows of this step, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Seconds that the parts of a step took, the way of the result to the host included."""

    verify_s: float  # target and verification
    draft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step that was run for its duration alone.

    Attributes:
        num_seqs: that it decoded.
        num_rows: of the target: one of each sequence, and its drafts.
        is_drafting: it also drafted for each of them.
    """

    num_seqs: int
    num_rows: int
    is_drafting: bool
    timing: StepTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """Host numbers only; nothing of the device leaves the runner."""

    outputs: tuple[SequenceOutput, ...]
    timing: StepTiming | None = field(default=None, compare=False)  # two equal results may take different times


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCommit:
    """What `Scheduler.update_from_output` committed for one sequence, for the output processor."""

    seq_id: int
    request_id: str
    new_token_ids: SequenceOf[int]  # already cut at end-of-sequence, stop ids and the length limit
    finish_reason: FinishReason | None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_parents: SequenceOf[int] | None = None  # of the verified drafts; None: a chain
    logprobs: SequenceOf[TokenLogprobs] = ()  # of each of `new_token_ids`, where the request asks
    prompt_logprobs: SequenceOf[TokenLogprobs] = ()  # of the prompt's tokens from `prompt_logprobs_start` on
    prompt_logprobs_start: int = 0

    def first(self, count: int) -> SequenceCommit:
        """The commit with its first `count` tokens alone."""
        return replace(self, new_token_ids=self.new_token_ids[:count], logprobs=self.logprobs[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request so far.

    The last two compare the client's prediction with the answer itself, not with what was drafted: they are the same
    for every drafter. They are counted when the answer has ended.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpecStats:
    """What speculation did for one request; names and meanings are those of `stats.SpecDecodeStats`."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """How long a request took, in seconds from its arrival; None: that never happened. Filled when it has ended."""

    queue_s: float | None
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What a client gets of one step. Deltas: concatenating `text` and `token_ids` gives the answer.

    `text` may lag behind `token_ids` while a stop string or a character is incomplete; the last output
    (with `finish_reason`) completes it. `error` is set, with finish_reason ERROR, when the server failed it.
    """

    request_id: str
    text: str
    token_ids: SequenceOf[int]
    finish_reason: FinishReason | None
    usage: Usage
    error: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the answer
    logprobs: SequenceOf[TokenLogprobs] | None = None  # one for each of `token_ids`; None unless asked for
    # One for each token of the prompt, None for the first one; on the first output alone, and only if asked for.
    prompt_logprobs: SequenceOf[TokenLogprobs | None] | None = None
    spec_stats: RequestSpecStats | None = None  # on the last output, if the engine got as far as to run the request
    times: RequestTimes | None = field(default=None, compare=False)  # on the last output

    @property
    def is_finished(self) -> bool:
        """True on the last output of a request."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInput:
    """A request at the engine's door: tokenised, checked, not yet a sequence."""

    request_id: str
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = field(default=0.0)
    predicted_token_ids: SequenceOf[int] = ()  # drafts of the client's own, see `drafter.prediction`
