"""What blocks of some rows and some length of draft take, as far as was measured. No torch."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

KEPT_TIMES, FEW = 32, 8
"""Seconds of so many blocks of a kind are kept; a line through all kinds weighs as much as `FEW` of them."""


class BlockTimes:
    """Seconds of the latest blocks, by number of rows and length of draft, relative to the machine's recent speed.

    Each time moves the speed, and by less, in the same proportion, what is usual for its kind. So the speed goes as far
    as blocks take longer than they did, and no further, however long nothing else is measured.
    """

    def __init__(self) -> None:
        self._seconds = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=KEPT_TIMES))
        self._last_block, self._slowness = (0, 0), 1.0
        self._usual: dict[tuple[int, int], float] = {}

    def add(self, rows: int, length: int, seconds: float, alone: bool = True) -> None:
        """Learn from a block, unless something was computed beside it."""
        seconds, block = max(seconds, 1e-9), (_bucket(rows), length)
        if alone and block == self._last_block:  # the first one of another shape takes longer
            known, usual = self._seconds[block], self._usual.setdefault(block, seconds / self._slowness)
            change = min(2.0, max(0.5, seconds / (self._slowness * usual)))
            self._slowness *= change**0.125
            self._usual[block] *= change ** (1 / (2 + len(known)))
            known.append(seconds / self._slowness)
        self._last_block = block

    def measured(self, rows: int) -> set[int]:
        """Lengths of which some block of about so many rows was measured."""
        return {length for count, length in self._seconds if count == _bucket(rows)}

    def expected(self, rows: int, lengths: Sequence[int]) -> list[float]:
        """Seconds of blocks, where few were measured drawn to the line through all of so many rows.

        Lower quartiles, because whatever disturbs a block makes it longer.
        """
        measured = {n: times for (count, n), times in self._seconds.items() if count == _bucket(rows)}
        points = [(length, sorted(times)[len(times) // 4], len(times)) for length, times in measured.items()]
        weight = sum(count for _, _, count in points)
        x, y = (sum(point[axis] * point[2] for point in points) / weight for axis in (0, 1))
        spread = sum(count * (length - x) ** 2 for length, _, count in points)
        slope = max(0.0, sum(count * (length - x) * (taken - y) for length, taken, count in points) / (spread or 1.0))
        known = {length: (taken, count) for length, taken, count in points}
        found = []
        for length in lengths:
            taken, count = known.get(length, (0.0, 0))
            line = max(y + slope * (length - x), 0.1 * y)
            found.append(self._slowness * (count * taken + FEW * line) / (count + FEW))
        return found


def _bucket(rows: int) -> int:
    """Numbers of rows whose blocks take about as long: within a factor of the square root of two."""
    return round(2 * math.log2(rows))
