"""What blocks of some rows and some length of draft take, as far as was measured. No torch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from statistics import median

KEPT_TIMES, FEW, LATEST = 32, 8, 16
"""Blocks of a kind that are kept; those that a line through all kinds weighs as much as; those that tell the speed."""


class BlockTimes:
    """Seconds of blocks, by number of rows and length of draft, relative to the machine's recent speed.

    Where another kind of blocks begins, its first `FEW` are compared with the latest of the kind before. All others of
    the same kind in a row only tell the speed. So kinds are compared by blocks that ran close together.
    """

    def __init__(self) -> None:
        self._seconds = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=KEPT_TIMES))
        self._last_block, self._in_a_row = (0, 0), 0
        self._recent = deque([1.0], maxlen=LATEST)

    def add(self, rows: int, length: int, seconds: float, alone: bool = True) -> None:
        """Learn from a block, unless something was computed beside it."""
        block = bucket(rows), length
        self._in_a_row = self._in_a_row + 1 if block == self._last_block else 0
        self._last_block = block
        if not alone or not self._in_a_row:  # the first one of another shape takes longer
            return
        known, seconds = self._seconds[block], max(seconds, 1e-9)
        if self._in_a_row <= FEW or len(known) < FEW:
            known.append(seconds / median(self._recent))
        else:
            self._recent.append(seconds / median(known))

    def measured(self, rows: int) -> dict[int, int]:
        """The lengths of which some blocks of about so many rows were measured, and how many are kept."""
        return {length: len(own) for (count, length), own in self._seconds.items() if count == bucket(rows)}

    def expected(self, rows: int, lengths: Sequence[int]) -> list[float]:
        """Seconds of blocks, where few were measured drawn to the line through all of so many rows.

        A line needs two lengths: where they were not measured, blocks of the nearest number of rows stand for these.
        """
        lengths_of = Counter(count for count, _ in self._seconds)
        known = [count for count, own in lengths_of.items() if own > 1]
        nearest = min(known, key=lambda count: abs(count - bucket(rows)), default=bucket(rows))
        measured = {n: times for (count, n), times in self._seconds.items() if count == nearest}
        points = [(length, median(times), len(times)) for length, times in measured.items()]
        weight = sum(count for _, _, count in points)
        x, y = (sum(point[axis] * point[2] for point in points) / weight for axis in (0, 1))
        spread = sum(count * (length - x) ** 2 for length, _, count in points)
        slope = max(0.0, sum(count * (length - x) * (taken - y) for length, taken, count in points) / (spread or 1.0))
        seen = {length: (taken, count) for length, taken, count in points}
        found, slowness = [], median(self._recent)
        for length in lengths:
            taken, count = seen.get(length, (0.0, 0))
            line = max(y + slope * (length - x), 0.1 * y)
            found.append(slowness * (count * taken + FEW * line) / (count + FEW))
        return found


def bucket(rows: int) -> int:
    """Numbers of rows whose blocks take about as long: within a factor of the square root of two."""
    return round(2 * math.log2(rows))
