"""Batches of few shapes, for devices that record a block once for each of them."""

from __future__ import annotations

from typing import NamedTuple

from engines.base import mask_length
from mtad.rows import Shape

SHORT = 1024
"""Columns of the shortest mask of engines that read masks whole; each length is four times the one before."""
FREE = 128
"""Positions up to which a step's matrix products should take no longer than reading the weights does; not measured.

By their data sheets, an A100 computes 156 in half precision in that time (312 TFLOP/s, 2.0 TB/s), an H100 295, an L4
more. What logits, filters and masks of padded rows take comes on top.
"""


class Buckets(NamedTuple):
    """What batches are padded to: rows to one of `counts`, candidates to a power of two, masks to one of `lengths`.

    Each within its limit. A padded row has the last row's parameters and two committed tokens.

    Attributes:
        pad: round them up; else rows and candidates stay as they are, and masks are multiples of 64 columns.
        pinned: whether batches lie in memory of the host that a GPU copies without its help.
        reads_mask: whether an engine's step takes longer where masks do. Others have masks of the whole capacity.
    """

    rows: int
    capacity: int
    pad: bool
    pinned: bool
    reads_mask: bool = True

    def counts(self, shape: Shape) -> list[int]:
        """Numbers of rows of blocks of a shape: one, all, and quarters of those down to what is `FREE`."""
        counts = [self.rows]
        while counts[-1] * max(1 + shape.scored, shape.width) > FREE and counts[-1] > 1:
            counts.append(-(-counts[-1] // 4))
        return sorted({1, *counts})

    @property
    def lengths(self) -> list[int]:
        """All lengths of masks."""
        lengths = [min(SHORT, self.capacity) if self.reads_mask else self.capacity]
        while lengths[-1] < self.capacity:
            lengths.append(min(4 * lengths[-1], self.capacity))
        return lengths

    def padded(self, rows: int, shape: Shape) -> int:
        return next(count for count in self.counts(shape) if count >= rows) if self.pad else rows

    def shape(self, shape: Shape, vocab_size: int) -> Shape:
        candidates = min(1 << (shape.candidates - 1).bit_length(), vocab_size)
        return shape._replace(candidates=candidates) if self.pad else shape

    def length(self, longest: int, shape: Shape) -> int:
        """Columns of its masks, where the longest row has `longest` committed tokens."""
        end = longest + shape.draft_len * shape.width
        if not self.pad:
            return mask_length(end, self.capacity)
        return next((length for length in self.lengths if length >= end), self.capacity)
