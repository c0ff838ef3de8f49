"""A long sequence in parts: gradients that add up to those of the whole, with the memory of a part.

Each rollout (an anchor and its depths) belongs to one segment. A segment computes its own elements and, as context, all
real slots before its end; it is judged on its own elements only, by the count of the whole sequence. So the sum of the
segments' gradients is the gradient of the sequence (peagle.md 3.4; arXiv 2602.01469, section 4). Owns the division.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peagle.training.cod import Elements


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Elements of one pass, and which of them it is judged on."""

    elements: Elements
    is_own: npt.NDArray[np.bool_]  # [T]


def partition(elements: Elements, *, num_slots: int, num_segments: int) -> list[Segment]:
    """Divide; segments without an element of their own are left out.

    Real slots go by their position. Mask slots go by the first of their chain, position a + 1, so that chains stay
    whole.
    """
    boundaries = np.arange(num_segments) * num_slots // num_segments
    begins = np.where(elements.depths == 0, elements.anchors, elements.anchors + 1)
    owner = np.searchsorted(boundaries, begins, side="right") - 1
    segments = []
    for index in range(num_segments):
        is_own = owner == index
        if not is_own.any():
            continue
        # Anchors of the own mask slots lie before the last own real slot, or are it.
        end = int(elements.anchors[is_own].max()) + 1
        needed = is_own | ((elements.depths == 0) & (elements.anchors < end))
        segments.append(
            Segment(
                elements=Elements(anchors=elements.anchors[needed], depths=elements.depths[needed]),
                is_own=is_own[needed],
            )
        )
    return segments
