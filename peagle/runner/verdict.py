"""What came of one sequence in a step, on the host."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from peagle.outputs import SequenceOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An output, and which drafts stand behind it."""

    output: SequenceOutput
    accepted_nodes: SequenceOf[int] | None = None  # which drafts stand, if they were a tree; None: the first ones
