"""The seam between the drafters that need no model: they look drafts up in tokens that are known already.

Owns the hand-offs, and the view of a sequence's tokens while a step is being finished. Refuses to know where a lookup
searches, and torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """All tokens of one sequence, those of the step that is being finished included.

    `committed` is the scheduler's own list, which grows between steps: it is read, and never copied.
    """

    seq_id: int
    committed: Sequence[int]
    new: Sequence[int]
    num_prompt_tokens: int
    predicted: Sequence[int] = ()  # what the client expects the answer to be

    def __len__(self) -> int:
        return len(self.committed) + len(self.new)

    def __getitem__(self, index: int) -> int:
        """The token at a position, counted from the start."""
        num_committed = len(self.committed)
        return self.committed[index] if index < num_committed else self.new[index - num_committed]

    def last(self, count: int) -> list[int]:
        """The last `count` tokens, or all of them if there are fewer."""
        return [self[index] for index in range(max(0, len(self) - count), len(self))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What was found. `confidences[i]` estimates how likely draft i is accepted if all before it are."""

    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


class TokenLookup(Protocol):
    """A drafter without a model. Called on the engine thread only."""

    @property
    def name(self) -> str:
        """As it is called in metrics."""
        ...

    def propose(self, history: TokenHistory, *, max_num_drafts: int) -> Lookup:
        """Drafts that may follow the history; none is an answer."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence has ended, or was not heard of for long. Unknown ids are ignored."""
        ...
