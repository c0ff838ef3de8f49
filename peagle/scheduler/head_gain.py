"""What the draft head is worth at a given load: tokens a second with it, over tokens a second without.

The last proposals, verified or not, are decoded again in thought, as if so many sequences had made them at once: the
rows that pay are chosen among them as a step would choose, with the costs of now. All proposals count, or the estimate
would be that of the promising ones, which alone are verified deep. Owns these proposals and the estimate. Refuses to
know who is served with the head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from peagle.scheduler.row_choice import choose_rows
from peagle.scheduler.step_costs import CostCurve

_NUM_KEPT = 1024  # those of a few answers: one answer is much easier to guess than another
_NUM_ENOUGH = 128  # proposals before the head is judged
_NUM_DECODED = 128  # proposals that are decoded in thought
_NEW_BEFORE_NEXT = 32  # proposals after which an estimate is made anew


class HeadGain:
    """Estimates from recent proposals.

    Args:
        verify_cost: of the target's passes, by rows.
        draft_cost: of the head's passes, by drafting sequences.
        expected: survivals of a usual proposal, where they are known beforehand: the head is judged from the start, and
            a hundred proposals of its own begin to count for more.
    """

    def __init__(self, verify_cost: CostCurve, draft_cost: CostCurve, expected: Sequence[float] = ()) -> None:
        self._verify_cost = verify_cost
        self._draft_cost = draft_cost
        self._chains: deque[Sequence[float]] = deque(maxlen=_NUM_KEPT)
        if expected:
            self._chains.extend([tuple(expected)] * _NUM_ENOUGH)
        self._num_seen = 0
        self._estimates: dict[int, tuple[float, int]] = {}  # by number of sequences, and when it was made

    def observe(self, survivals: Sequence[float]) -> None:
        """A proposal: how likely it was that its first i + 1 drafts survive, for each i."""
        self._chains.append(survivals)
        self._num_seen += 1

    def at(self, num_seqs: int) -> float:
        """Expected speedup with `num_seqs` decoding; infinite while nothing is known that speaks against the head."""
        if len(self._chains) < _NUM_ENOUGH or not self._verify_cost.is_known:
            return float("inf")
        estimate, made_at = self._estimates.get(num_seqs, (0.0, -_NEW_BEFORE_NEXT))
        if self._num_seen - made_at >= _NEW_BEFORE_NEXT:
            estimate = self._estimate(num_seqs)
            self._estimates[num_seqs] = estimate, self._num_seen
        return estimate

    def _estimate(self, num_seqs: int) -> float:
        drafting_s = self._draft_cost.seconds(num_seqs)
        tokens = seconds = 0.0
        num_steps = max(_NUM_DECODED // num_seqs, 8)
        for step in range(num_steps):
            # Proposals at even distances, so that a step's come from different answers where there are several.
            first = step * len(self._chains) // num_steps
            stride = max(len(self._chains) // num_seqs, 1)
            places = [(first + index * stride) % len(self._chains) for index in range(num_seqs)]
            chains = [self._chains[place] for place in places]
            choice = choose_rows(chains, num_other_rows=0, rows_s=self._verify_cost.seconds, drafting_s=drafting_s)
            tokens += choice.tokens
            seconds += choice.seconds
        plain = num_seqs / max(self._verify_cost.seconds(num_seqs), 1e-9)
        return tokens / seconds / plain
