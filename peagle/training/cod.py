"""Conditional drop-token sampling: which positions each depth of the parallel draft is trained at.

Training K depths at every position costs K times the rows. Depth d keeps about r^d of the positions, nested so that a
kept element has its whole chain: (anchor a, depth d) is kept only if (a, d - 1) is (P-EAGLE, arXiv 2602.01469,
section 4; the idea is PARD's). Owns the draw. Refuses to know tensors and heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Elements:
    """Rows of a training pass: slot position is anchor + depth. Depth 0 comes first, anchors ascending."""

    anchors: IntArray  # [T]
    depths: IntArray  # [T]

    @property
    def positions(self) -> IntArray:
        """Slot of each element, [T]."""
        return self.anchors + self.depths

    @property
    def num_real(self) -> int:
        """Rows of depth 0."""
        return int((self.depths == 0).sum())

    def __len__(self) -> int:
        return len(self.anchors)

    def by_chain(self) -> Elements:
        """The same elements, mask slots ordered by anchor, then by depth."""
        order = np.lexsort((self.depths, self.anchors, self.depths > 0))
        return Elements(anchors=self.anchors[order], depths=self.depths[order])


def sample_elements(
    is_supervised_slot: npt.NDArray[np.bool_],
    *,
    depth: int,
    retention: float,
    floor: float,
    rng: np.random.Generator,
) -> Elements:
    """Draw the elements of one sequence.

    Args:
        is_supervised_slot: [n], whether the token that slot p predicts is learned from.
        depth: K, depths 0 to K - 1.
        retention: r.
        floor: least share of the positions that a depth keeps.
        rng: of the draw.

    Returns:
        Every slot at depth 0 (all are context), then, depth after depth, the kept, supervised ones.
    """
    num_slots = len(is_supervised_slot)
    anchors, depths = [np.arange(num_slots)], [np.zeros(num_slots, dtype=np.int64)]
    kept = np.arange(num_slots)  # positions at the depth before
    num_valid = int(is_supervised_slot.sum())
    for d in range(1, depth):
        pool = kept[kept + 1 < num_slots] + 1
        pool = pool[is_supervised_slot[pool]]
        # An anchor whose own prediction is never learned from still begins a chain: in serving the first draft of an
        # answer follows the prompt's last slot.
        wanted = round(max(num_valid - d, 0) * max(retention**d, floor))
        kept = np.sort(rng.choice(pool, wanted, replace=False)) if wanted < len(pool) else pool
        anchors.append(kept - d)
        depths.append(np.full(len(kept), d, dtype=np.int64))
    return Elements(anchors=np.concatenate(anchors), depths=np.concatenate(depths))
