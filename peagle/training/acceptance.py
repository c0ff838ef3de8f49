"""How a decode went: rounds, tokens, and which drafts were accepted.

Owns the counting, in plain integers. Acceptance length is the mean number of tokens of a round, the target's own
included: between 1 and K + 1. The first token of an answer comes with the prompt and belongs to no round. Refuses to
know where drafts come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """Counts of one or more decodes with K drafts a round. Position 0 is the first draft."""

    num_rounds: int
    num_tokens: int
    num_checked: tuple[int, ...]  # [K], rounds in which the draft was compared: all earlier ones were accepted
    num_accepted: tuple[int, ...]  # [K]

    @property
    def num_speculative_tokens(self) -> int:
        """K."""
        return len(self.num_checked)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens of a round; 0 without any round."""
        return _ratio(self.num_tokens, self.num_rounds)

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """For each position, accepted of those that were compared."""
        return tuple(_ratio(*pair) for pair in zip(self.num_accepted, self.num_checked, strict=True))

    @property
    def cumulative_rates(self) -> tuple[float, ...]:
        """For each position, accepted of all rounds."""
        return tuple(_ratio(accepted, self.num_rounds) for accepted in self.num_accepted)

    def as_json(self) -> dict[str, Any]:
        """Counts and rates."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "acceptance_length": self.acceptance_length,
            "conditional_rates": list(self.conditional_rates),
            "cumulative_rates": list(self.cumulative_rates),
            "num_rounds": self.num_rounds,
            "num_tokens": self.num_tokens,
        }


def add_counts(counts: Iterable[AcceptanceCounts], *, num_speculative_tokens: int) -> AcceptanceCounts:
    """Counts of several decodes with the same K together."""
    every = list(counts)
    depths = range(num_speculative_tokens)
    return AcceptanceCounts(
        num_rounds=sum(one.num_rounds for one in every),
        num_tokens=sum(one.num_tokens for one in every),
        num_checked=tuple(sum(one.num_checked[depth] for one in every) for depth in depths),
        num_accepted=tuple(sum(one.num_accepted[depth] for one in every) for depth in depths),
    )


def walk(answer: Sequence[int], drafts: Sequence[Sequence[int]], *, num_speculative_tokens: int) -> AcceptanceCounts:
    """Decode an answer that is known already.

    Greedy drafts depend on the committed tokens alone, so they can be made for every place of the answer beforehand;
    a decode then only visits the places where its rounds begin.

    Args:
        answer: what the target says, R tokens.
        drafts: [R - 1][>= K]; `drafts[i]` follow the first i + 1 tokens.
        num_speculative_tokens: K.
    """
    num_rounds, num_committed = 0, min(1, len(answer))
    checked, accepted = [0] * num_speculative_tokens, [0] * num_speculative_tokens
    while num_committed < len(answer):
        proposed = drafts[num_committed - 1][:num_speculative_tokens]
        num_accepted = 0
        for depth, (draft, token) in enumerate(zip(proposed, answer[num_committed:], strict=False)):
            checked[depth] += 1
            if draft != token:
                break
            accepted[depth] += 1
            num_accepted += 1
        num_committed += num_accepted + 1
        num_rounds += 1
    return AcceptanceCounts(
        num_rounds=num_rounds,
        num_tokens=max(len(answer) - 1, 0),
        num_checked=tuple(checked),
        num_accepted=tuple(accepted),
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
