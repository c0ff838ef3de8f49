"""One sequence: the engine's unit of work, and everything the host knows of it.

Owns token ids, progress counters and status. Refuses to hold tensors (device state lives in the runner) and block
tables (they live in the KV cache manager), and is written to by the scheduler only: drafter and verifier propose,
`Scheduler.update_from_output` commits.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from peagle.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence stands. PREEMPTED is WAITING with a history: its KV was given up and is recomputed."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a sequence ended. The values are those of the `finished_reason` metric label."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """State of one sequence.

    Attributes:
        seq_id: internal id, unique in the life of an engine, increasing with arrival.
        request_id: the id that the client sees.
        token_ids: prompt, then output; grows by committed tokens only.
        num_prompt_tokens: how many of `token_ids` are the prompt.
        params: what the request asks of sampling.
        seed: key of the noise, resolved (never None).
        eos_token_ids: ids that end an answer unless `params.ignore_eos`.
        max_num_tokens: length at which the sequence ends with LENGTH: min(context, prompt + max_tokens).
        priority: lower runs first, where the policy is `priority`.
        cache_salt: keeps this sequence's cached prefixes apart from those of other salts.
        arrival_time: `time.monotonic()` seconds at the door.
        num_computed_tokens: tokens whose KV is written and valid, counted from the start.
        draft_token_ids: proposals that the next step verifies; never part of `token_ids`.
        draft_parents: of each draft its parent among the drafts, -1 for none; None if they are a chain.
        draft_confidences: the drafter's estimate that each draft is accepted if its parent is.
        predicted_token_ids: what the client expects the answer to be.
        uses_head: the draft head keeps KV of this sequence and drafts for it.
        num_cached_tokens: prompt tokens that the prefix cache served when the sequence was first scheduled.
        num_preemptions: how often its KV was given up.
    """

    seq_id: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    max_num_tokens: int
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = 0.0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    draft_parents: list[int] | None = None
    draft_confidences: list[float] = field(default_factory=list)
    predicted_token_ids: tuple[int, ...] = ()
    uses_head: bool = True
    num_cached_tokens: int | None = None
    num_preemptions: int = 0

    def drop_drafts(self) -> None:
        """Forget the proposals."""
        self.draft_token_ids, self.draft_parents, self.draft_confidences = [], None, []

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and committed output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The committed output (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """True once a finish reason is set; nothing is committed to it any more."""
        return self.status is SequenceStatus.FINISHED
