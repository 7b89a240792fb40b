"""Batches of few shapes, for devices that record a block once for each of them."""

from __future__ import annotations

from typing import NamedTuple

from engines.base import KV_PAGE, mask_length
from mtad.rows import Shape

SHORT = 1024
"""Columns of the shortest mask of engines that read a row's own columns only. Masks take time to build, and a kernel
is split by the length of its mask, so there are several lengths, each four times the one before."""


class Buckets(NamedTuple):
    """What batches are padded to: rows and candidates to a power of two, masks to one of `lengths`.

    Each within its limit. A padded row has the last row's parameters and two committed tokens.

    Attributes:
        pad: round them up; else rows and candidates stay as they are, and masks are multiples of 64 columns.
        pinned: whether batches lie in memory of the host that a GPU copies without its help.
        reads_mask: whether an engine's step takes longer where masks do.
    """

    rows: int
    capacity: int
    pad: bool
    pinned: bool
    reads_mask: bool = True

    @property
    def counts(self) -> list[int]:
        """All numbers of rows."""
        return sorted({min(1 << power, self.rows) for power in range(self.rows.bit_length() + 1)})

    @property
    def lengths(self) -> list[int]:
        """All lengths of masks."""
        shortest, ratio = (KV_PAGE, 2) if self.reads_mask else (SHORT, 4)
        lengths = [min(shortest, self.capacity)]
        while lengths[-1] < self.capacity:
            lengths.append(min(ratio * lengths[-1], self.capacity))
        return lengths

    def padded(self, rows: int) -> int:
        return min(1 << (rows - 1).bit_length(), self.rows) if self.pad else rows

    def shape(self, shape: Shape, vocab_size: int) -> Shape:
        candidates = min(1 << (shape.candidates - 1).bit_length(), vocab_size)
        return shape._replace(candidates=candidates) if self.pad else shape

    def length(self, longest: int, shape: Shape) -> int:
        """Columns of its masks, where the longest row has `longest` committed tokens."""
        end = longest + shape.draft_len * shape.width
        if not self.pad:
            return mask_length(end, self.capacity)
        return next((length for length in self.lengths if length >= end), self.capacity)
