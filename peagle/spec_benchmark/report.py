"""The table of `peagle bench spec`, and its JSON.

Owns the layout. Refuses to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peagle.spec_benchmark.measure import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant at one concurrency, compared with plain decoding in the same run."""

    variant: str
    concurrency: int
    rounds: tuple[Round, ...]
    plain: tuple[Round, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of the best round: the others were disturbed by something."""
        return max(one.tokens_per_s for one in self.rounds)

    @property
    def ratio(self) -> float:
        """To the best plain round."""
        return self.tokens_per_s / max(one.tokens_per_s for one in self.plain)

    @property
    def acceptance_length(self) -> float:
        """Over all rounds."""
        drafts = sum(one.num_drafts for one in self.rounds)
        return 1.0 + sum(one.num_accepted_tokens for one in self.rounds) / drafts if drafts else 1.0

    @property
    def rates(self) -> list[float]:
        """Share of proposals whose drafts up to a position were accepted."""
        drafts = sum(one.num_drafts for one in self.rounds)
        columns = zip(*(one.accepted_per_position for one in self.rounds), strict=True)
        return [sum(column) / drafts if drafts else 0.0 for column in columns]

    @property
    def num_different(self) -> int:
        """Answers that are not those of plain decoding."""
        truth = self.plain[0].answers
        return sum(mine != theirs for mine, theirs in zip(self.rounds[0].answers, truth, strict=True))

    def as_json(self) -> dict[str, Any]:
        """All of it but the answers."""
        return {
            "variant": self.variant,
            "concurrency": self.concurrency,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "tokens_per_s_of_rounds": [round(one.tokens_per_s, 2) for one in self.rounds],
            "ratio_to_none": round(self.ratio, 3),
            "acceptance_length": round(self.acceptance_length, 3),
            "acceptance_per_position": [round(rate, 4) for rate in self.rates],
            "num_tokens": self.rounds[0].num_tokens,
            "num_steps": self.rounds[0].num_steps,
            "num_different_answers": self.num_different,
        }


def render_table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [
        f"{'variant':<18} {'at once':>7} {'tokens/s':>9} {'to none':>8} {'length':>7}  accepted per position",
        "-" * 78,
    ]
    for row in rows:
        rates = " ".join(f"{rate:.2f}" for rate in row.rates)
        different = f"  ({row.num_different} answers differ)" if row.num_different else ""
        lines.append(
            f"{row.variant:<18} {row.concurrency:>7} {row.tokens_per_s:>9.1f} {row.ratio:>7.2f}x "
            f"{row.acceptance_length:>7.2f}  {rates}{different}"
        )
    return "\n".join(lines)
