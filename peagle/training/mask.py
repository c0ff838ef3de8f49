"""Who sees whom among the elements of a training pass (peagle.md 3.3).

A query (a_q, d_q) sees the real slots up to its anchor, and the mask slots of its own chain up to itself: what a slot
sees in serving. Owns the rule, as a mask from scratch and as a view of one that was made once. Refuses to know heads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peagle.training.cod import Elements

BoolArray = npt.NDArray[np.bool_]


def visible_reference(elements: Elements) -> BoolArray:
    """The rule as it is written, pair by pair: [T, T], rows are queries."""
    pairs = list(zip(elements.anchors.tolist(), elements.depths.tolist(), strict=True))
    return np.array(
        [[(d_k == 0 and a_k <= a_q) or (a_k == a_q and d_k <= d_q) for a_k, d_k in pairs] for a_q, d_q in pairs],
        dtype=np.bool_,
    )


class VisibilityTable:
    """The mask of every element of the longest sequence, made once; that of a sequence is a choice of its rows.

    In position-major order (anchor, then depth) the rule does not depend on the length, so a shorter sequence's mask
    is the upper left corner, and elements that COD dropped are left out by index (arXiv 2602.01469, section 4).

    Args:
        max_slots: longest sequence, in slots.
        depth: K.
    """

    def __init__(self, *, max_slots: int, depth: int) -> None:
        self._depth = depth
        anchors = np.repeat(np.arange(max_slots), depth)
        depths = np.tile(np.arange(depth), max_slots)
        self._visible = visible(Elements(anchors=anchors, depths=depths))

    def lookup(self, elements: Elements) -> Tensor:
        """The mask of some elements, [T, T] bool."""
        index = torch.from_numpy(elements.anchors * self._depth + elements.depths)
        return self._visible[index[:, None], index]


def visible(elements: Elements) -> Tensor:
    """The mask of some elements, [T, T] bool, from their numbers."""
    anchors, depths = torch.from_numpy(elements.anchors), torch.from_numpy(elements.depths)
    context = (depths == 0) & (anchors <= anchors[:, None])
    chain = (anchors == anchors[:, None]) & (depths <= depths[:, None])
    return context | chain
