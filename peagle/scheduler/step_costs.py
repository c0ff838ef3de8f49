"""What a step costs, by its number of rows: measured at start, and corrected by every decoding step since.

Owns the measured points and the curve through them. Rows between two points are interpolated, and more rows never cost
less. Refuses to know clocks: seconds are handed in.
"""

from __future__ import annotations

from bisect import bisect_left

_WEIGHT = 0.05  # of a new measurement: about the last twenty count
_EXACT_ROWS = 32  # beyond it neighbouring row counts share a point
_SLOWEST = 4.0  # a step that took this many times longer says something about the machine, not about its rows


class CostCurve:
    """Seconds by rows, for one kind of pass."""

    def __init__(self) -> None:
        self._points: dict[int, float] = {}
        self._rows: list[int] = []
        self._seconds: list[float] = []

    @property
    def is_known(self) -> bool:
        """True once something was measured."""
        return bool(self._points)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Count one measurement."""
        point = _point_of(num_rows)
        known = self._points.get(point)
        if known is None:
            self._points[point] = seconds
        else:
            self._points[point] += _WEIGHT * (min(seconds, _SLOWEST * known) - known)
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
        self._rows = sorted(self._points)
        highest = 0.0
        self._seconds = []
        for row in self._rows:
            highest = max(highest, self._points[row])
            self._seconds.append(highest)


def _point_of(num_rows: int) -> int:
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return num_rows // step * step
