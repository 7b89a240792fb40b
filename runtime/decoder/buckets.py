"""Batches of few shapes, for devices that record a block once for each of them."""

from __future__ import annotations

from typing import NamedTuple

SHORT = 1024
"""Columns of the shortest mask of engines that read masks whole; each length is four times the one before."""
FREE = 128
"""Positions up to which a step's matrix products take no longer than reading the weights does, by data sheets of GPUs
from the A100 (156 in half precision) on; not measured."""


class Buckets(NamedTuple):
    """What batches are padded to: rows to one of `counts`, masks to one of `lengths`.

    Attributes:
        rows, capacity: the limits.
        reads_mask: whether an engine's step takes longer where masks do. Others have masks of the whole capacity.
    """

    rows: int
    capacity: int
    reads_mask: bool = True

    def counts(self, tokens: int) -> list[int]:
        """Numbers of rows of blocks whose widest step has `tokens` per row: one, all, and quarters down to `FREE`."""
        counts = [self.rows]
        while counts[-1] * tokens > FREE and counts[-1] > 1:
            counts.append(-(-counts[-1] // 4))
        return sorted({1, *counts})

    @property
    def lengths(self) -> list[int]:
        """All lengths of masks."""
        lengths = [min(SHORT, self.capacity) if self.reads_mask else self.capacity]
        while lengths[-1] < self.capacity:
            lengths.append(min(4 * lengths[-1], self.capacity))
        return lengths

    def padded(self, rows: int, tokens: int) -> int:
        """Rows that a block of `rows` rows is padded to."""
        return next(count for count in self.counts(tokens) if count >= rows)

    def length(self, end: int) -> int:
        """Columns of masks that reach `end` columns."""
        return next((length for length in self.lengths if length >= end), self.capacity)
