"""Sequences that a run of paged attention consists of, and those of rows that are texts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.cache.page_table import Ints, PageTable


class Sequences(NamedTuple):
    """Sequences of a run, one behind the other.

    Attributes:
        past: int64 [N], columns that are there before each one's new tokens.
        sizes: int64 [N], new tokens of each.
        rows, columns: int64 [T], whose token each of the new tokens is.
        pages: int32, the pages of each sequence's columns.
        used: int64 [N], how many of these each one has.
        copies: pages to copy before the run, (from, to); all are read before any is written.
    """

    past: Ints
    sizes: Ints
    rows: Ints
    columns: Ints
    pages: NDArray[np.int32]
    used: Ints
    copies: list[tuple[int, int]]


def texts_of(table: PageTable, rows: Ints, past: Ints, ends: Ints) -> Sequences:
    """A sequence per row, of its columns past .. ends - 1, int64 [R]; the row is given pages of its own for them."""
    sizes = ends - past
    lacking = np.flatnonzero(table.missing(rows, past, ends)).tolist()
    copies = [pair for n in lacking for pair in table.make_writable(rows[n], past[n], ends[n])]
    used, pages = -(-ends // table.size), table.table[rows]
    first = np.repeat(past - sizes.cumsum() + sizes, sizes)
    return Sequences(
        past=past,
        sizes=sizes,
        rows=np.repeat(rows, sizes),
        columns=np.arange(len(first)) + first,
        pages=pages[np.arange(pages.shape[1]) < used[:, None]],
        used=used,
        copies=copies,
    )
