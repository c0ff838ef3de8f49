"""Which fixed shapes exist, and which one a batch is padded to.

Owns the choice. Refuses to know what runs in a shape.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring sequences of a grid that gather the same number of KV blocks."""

    num_seqs: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class GridShape:
    """A decoding step's fixed shape: every sequence has `width` rows; `spans` tile the sequences.

    Captured graphs have one span. Eagerly there may be more, so that a long sequence does not make short ones gather
    its length.
    """

    width: int
    spans: tuple[Span, ...]

    @property
    def num_seqs(self) -> int:
        """Sequences of the grid, padding included."""
        return sum(span.num_seqs for span in self.spans)

    @property
    def num_rows(self) -> int:
        """Rows of the grid."""
        return self.num_seqs * self.width


class Buckets:
    """An increasing list of sizes.

    Args:
        sizes: the sizes; a value is rounded up to the next of them.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def round_up(self, value: int) -> int:
        """The smallest size that holds `value`.

        Raises:
            ValueError: no size does.
        """
        index = bisect_left(self.sizes, value)
        if index == len(self.sizes):
            raise ValueError(f"{value} is beyond the largest bucket {self.sizes[-1]}")
        return self.sizes[index]

    @classmethod
    def every(cls, largest: int) -> Buckets:
        """All sizes up to `largest`: no padding, for devices where a shape costs nothing."""
        return cls(tuple(range(1, largest + 1)))

    @classmethod
    def doubling(cls, largest: int) -> Buckets:
        """1, 2, 4, ... and `largest` itself."""
        sizes = []
        size = 1
        while size < largest:
            sizes.append(size)
            size *= 2
        return cls((*sizes, largest))


def split_spans(block_counts: list[int], *, min_saved_blocks: int) -> tuple[Span, ...]:
    """Tile sequences, sorted by falling block count, into spans.

    A new span starts where going on would gather `min_saved_blocks` blocks for nothing; each span costs a gather and an
    attention call per layer, so small savings are not worth one.

    Args:
        block_counts: blocks of each sequence, falling.
        min_saved_blocks: padding blocks that justify another span.
    """
    spans: list[Span] = []
    first = 0
    for index, count in enumerate(block_counts):
        saved = (block_counts[first] - count) * (len(block_counts) - index)
        if index > first and saved >= min_saved_blocks:
            spans.append(Span(index - first, block_counts[first]))
            first = index
    spans.append(Span(len(block_counts) - first, block_counts[first]))
    return tuple(spans)
