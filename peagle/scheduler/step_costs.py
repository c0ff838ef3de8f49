"""What a step costs, by its number of rows: measured at start, and corrected by every decoding step since.

Owns the measured points and the curve through them. Rows between two points are interpolated, and more rows never cost
less: where measurements say so, neighbours share their mean, each weighed by how often it was measured. Refuses to know
clocks: seconds are handed in.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

_WEIGHT = 0.05  # of a new measurement: about the last twenty count
_EXACT_ROWS = 32  # beyond it neighbouring row counts share a point
_SLOWEST = 4.0  # a step that took this many times longer says something about the machine, not about its rows


@dataclass(slots=True)
class _Point:
    """What is known of one number of rows. The first pass of a shape pays for its kernels: the better of the first two
    counts as one measurement.
    """

    seconds: float
    num_observed: int = 1

    @property
    def weight(self) -> float:
        """How far it can be trusted."""
        return max(min(self.num_observed - 1, 1 / _WEIGHT), 0.25)

    def observe(self, seconds: float) -> None:
        self.num_observed += 1
        if self.num_observed == 2:
            self.seconds = min(self.seconds, seconds)
        else:
            share = max(1 / (self.num_observed - 1), _WEIGHT)
            self.seconds += share * (min(seconds, _SLOWEST * self.seconds) - self.seconds)


class CostCurve:
    """Seconds by rows, for one kind of pass."""

    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}
        self._rows: list[int] = []
        self._seconds: list[float] = []

    @property
    def is_known(self) -> bool:
        """True once something was measured."""
        return bool(self._points)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Count one measurement."""
        point = _point_of(num_rows)
        if point in self._points:
            self._points[point].observe(seconds)
        else:
            self._points[point] = _Point(seconds)
        self._refresh()

    def seconds(self, num_rows: int) -> float:
        """Estimate for a pass of `num_rows`; 0 without any measurement."""
        rows, seconds = self._rows, self._seconds
        if not rows or num_rows <= 0:
            return 0.0
        index = bisect_left(rows, num_rows)
        if index == 0:
            return seconds[0]
        if index == len(rows):  # as the last two points go on; alone, in proportion
            if len(rows) == 1:
                return seconds[0] * num_rows / rows[0]
            index -= 1
        share = (num_rows - rows[index - 1]) / (rows[index] - rows[index - 1])
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])

    def _refresh(self) -> None:
        """The non-decreasing curve that is nearest to the points: neighbours that contradict it are pooled."""
        self._rows = sorted(self._points)
        pools: list[tuple[float, float, int]] = []  # seconds, weight, number of points
        for row in self._rows:
            point = self._points[row]
            seconds, weight, count = point.seconds, point.weight, 1
            while pools and pools[-1][0] > seconds:
                before, its_weight, its_count = pools.pop()
                seconds = (before * its_weight + seconds * weight) / (its_weight + weight)
                weight, count = weight + its_weight, count + its_count
            pools.append((seconds, weight, count))
        self._seconds = [seconds for seconds, _, count in pools for _ in range(count)]


def _point_of(num_rows: int) -> int:
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return num_rows // step * step
