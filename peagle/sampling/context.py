"""What a row's parameters may look at beside its logits: the tokens before it, and what is forbidden to it.

Owns the view of one sequence's tokens as arrays, made once for all rows of the sequence, and a row's place among its
drafts. Refuses to touch logits (`adjustments` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from peagle.sampling_params import SamplingParams

IntArray = NDArray[np.int64]
Bitmask = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens that a text has, each once."""

    token_ids: IntArray  # [M] ascending
    in_output: IntArray  # [M] how often the answer has it; 0 for tokens of the prompt alone

    def with_output(self, token_ids: Sequence[int]) -> TokenCounts:
        """The same after an answer that is longer by `token_ids`."""
        if not token_ids:
            return self
        every_id = np.concatenate([self.token_ids, np.asarray(token_ids, dtype=np.int64)])
        times = np.concatenate([self.in_output, np.ones(len(token_ids), dtype=np.int64)])
        unique, place = np.unique(every_id, return_inverse=True)
        total = np.zeros(len(unique), dtype=np.int64)
        np.add.at(total, place.reshape(-1), times)
        return TokenCounts(token_ids=unique, in_output=total)


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, which leave no room for what is computed once
class SequenceContext:
    """One sequence in one step, shared by its rows."""

    params: SamplingParams
    known_token_ids: Sequence[int]  # prompt and committed output
    num_prompt_tokens: int
    end_token_ids: frozenset[int] = frozenset()  # that end the answer, end of sequence and stop tokens alike

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.known_token_ids) - self.num_prompt_tokens

    @cached_property
    def counts(self) -> TokenCounts:
        """Of prompt and committed output."""
        known = np.asarray(self.known_token_ids, dtype=np.int64)
        unique = np.unique(known[: self.num_prompt_tokens])
        prompt = TokenCounts(token_ids=unique, in_output=np.zeros(len(unique), dtype=np.int64))
        return prompt.with_output(self.known_token_ids[self.num_prompt_tokens :])

    @cached_property
    def allowed(self) -> IntArray:
        """`allowed_token_ids` as an array; only where there are some."""
        assert self.params.allowed_token_ids is not None
        return np.fromiter(self.params.allowed_token_ids, dtype=np.int64)

    @cached_property
    def ends(self) -> IntArray:
        """`end_token_ids` as an array."""
        return np.fromiter(self.end_token_ids, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowContext:
    """One verified row: what its token comes after."""

    sequence: SequenceContext
    draft_token_ids: tuple[int, ...] = ()  # drafts between the known tokens and this row's token
    allowed_mask: Bitmask | None = None  # [ceil(V / 32)], lowest bit first: tokens that the grammar allows here

    @property
    def counts(self) -> TokenCounts:
        """Tokens before this row's token."""
        return self.sequence.counts.with_output(self.draft_token_ids)

    @property
    def is_too_early(self) -> bool:
        """True while the answer is shorter than `min_tokens`, so that no token may end it."""
        return self.sequence.num_output_tokens + len(self.draft_token_ids) < self.sequence.params.min_tokens

    def bad_token_ids(self) -> list[int]:
        """Tokens that would complete one of `bad_words` here."""
        bad_words = self.sequence.params.bad_words
        longest = max((len(word) for word in bad_words), default=1) - 1
        tail = self._last_output(longest)
        found = (word[-1] for word in bad_words if len(word) - 1 <= len(tail) and _ends_with(tail, word[:-1]))
        return sorted(set(found))

    def _last_output(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens of the answer, or all of them if there are fewer."""
        num_committed = min(max(count - len(self.draft_token_ids), 0), self.sequence.num_output_tokens)
        known = self.sequence.known_token_ids
        return (*known[len(known) - num_committed :], *self.draft_token_ids)


def _ends_with(tokens: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return not end or tokens[-len(end) :] == end
