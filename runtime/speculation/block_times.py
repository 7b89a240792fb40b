"""What blocks of some rows and some length of draft take, as far as was measured. No torch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from statistics import median

KEPT = 12
"""Blocks of a kind that are kept; and latest blocks of any kind, whose median tells the machine's speed."""

STEADY = 4
"""A kind is steady after more blocks in a row than this; a probe has just as many."""

LINE = 4
"""Measured blocks of a kind that the line through all kinds weighs as much as."""


class BlockTimes:
    """Seconds of blocks, by number of rows and length of draft, relative to the machine's recent speed.

    Every block tells the speed, compared with what its kind takes. What its kind takes is learnt from it as well, by
    the speed of the blocks before it. A kind that is known, and has been steady, is not learnt again until another one
    has been steady: blocks that compare kinds are those that ran close together.
    """

    def __init__(self) -> None:
        self._seconds = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=KEPT))
        self._last_block, self._steady, self._in_a_row = (0, -1), (0, -1), 0
        self._shapes = set[tuple[int, int]]()
        self._recent = deque([1.0], maxlen=KEPT)

    def add(self, rows: int, length: int, seconds: float, alone: bool = True, after_change: bool = False) -> None:
        """Learn from a block, unless something was computed beside it, or the block before it had another shape.

        Args:
            after_change: also from one after another shape, for which an engine may prepare itself, but not from the
                first one of all, for which it captures a graph or takes memory.
        """
        block = bucket(rows), length
        self._in_a_row = self._in_a_row + 1 if block == self._last_block else 0
        tells = alone and (self._in_a_row > 0 or (after_change and block in self._shapes))
        self._last_block = block
        self._shapes.add(block)
        if not tells:
            return
        known, seconds, slowness = self._seconds[block], max(seconds, 1e-9), median(self._recent)
        if known:
            self._recent.append(seconds / median(known))
        if block != self._steady:
            known.append(seconds / slowness)
        if self._in_a_row >= STEADY:
            self._steady = block

    def measured(self, rows: int) -> set[int]:
        """The lengths of which some blocks of about so many rows were measured."""
        return {length for count, length in self._seconds if count == bucket(rows)}

    def longest(self, rows: int) -> int:
        """The longest length that was measured, of those that `expected` goes by."""
        return max(self._nearest(rows))

    def expected(self, rows: int, lengths: Sequence[int]) -> list[float]:
        """Seconds of blocks, where few were measured drawn to the line through all of so many rows.

        A line needs two lengths: where they were not measured, blocks of the nearest number of rows stand for these.
        """
        measured = self._nearest(rows, lengths)
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
            found.append(slowness * (count * taken + LINE * line) / (count + LINE))
        return found

    def _nearest(self, rows: int, wanted: Sequence[int] = (-1,)) -> dict[int, deque[float]]:
        """The measured seconds of each length: at this number of rows, if all that are wanted were measured there.

        Else at the nearest number of rows of which two lengths were.
        """
        lengths_of = Counter(count for count, _ in self._seconds)
        known = [count for count, own in lengths_of.items() if own > 1]
        nearest = min(known, key=lambda count: abs(count - bucket(rows)), default=bucket(rows))
        nearest = bucket(rows) if self.measured(rows).issuperset(wanted) else nearest
        return {n: times for (count, n), times in self._seconds.items() if count == nearest}


def bucket(rows: int) -> int:
    """Numbers of rows whose blocks take about as long: within a factor of the square root of two."""
    return round(2 * math.log2(rows))
