"""Beams of drafts as sequences of their own: each has a few pages behind the row's, and its path lies there in place.

A level of a draft is a step over nodes that do not see each other. Each node continues its parent's sequence by one
token, in pages that begin as a copy of the parent's; the full pages of the row itself are shared by all its beams. An
example: a row has 40 committed columns, so columns 32 to 39 lie on its second page. Each beam has a copy of that page,
and the path of the beam goes on from column 40 of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.pages import Ints, PageTable


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


class Beams:
    """The beams that the rows' latest steps were over.

    Args:
        table: of the rows; the beams' pages are numbered behind those of its pool, and one more.

    Attributes:
        slots: beams of a row that there are pages for.
        each: pages of a beam.
    """

    def __init__(self, table: PageTable) -> None:
        self._table, self.slots, self.each = table, 1, 1
        rows = len(table.table)
        self._ends = np.full((rows, 1), -1)  # the last column of the path that each beam holds, from the base on
        self._paths = np.full((rows, 1, 1), -1)  # all its columns, from the base on

    @property
    def count(self) -> int:
        """Pages of all beams together."""
        return len(self._ends) * self.slots * self.each

    def forget(self, rows: Ints | int) -> None:
        self._ends[rows] = self._paths[rows] = -1

    def pages(self, rows: Ints | int, slots: Ints | int = 0) -> Ints:
        """The pages of beams: one more axis than `rows` and `slots` have together."""
        beams = np.asarray(rows * self.slots + slots)
        first: Ints = len(self._table.pages.users) + 1 + beams * self.each
        return first[..., None] + np.arange(self.each)

    def extend(self, rows: Ints, base: Ints, seen: NDArray[np.bool_]) -> Sequences:
        """Continue beams by a token each: R x S sequences, row by row.

        A path whose parent was not among the beams of the row's last step is run again from the base on.

        Args:
            rows: int64 [R].
            base: int64 [R], where each row's draft begins; all that is before is stored.
            seen: [R, S, T], which of the columns from the base on each node sees. The last one is its own.
        """
        size, length, steps = self._table.size, seen.sum(-1), seen.shape[1]
        depth, whole = int(length.max()), base // size  # `whole`: the row's pages that its beams share
        used = -(-(base[:, None] + length) // size)
        self._reserve(steps, int((used - whole[:, None]).max()), depth)
        own = self.pages(rows[:, None], np.arange(steps))

        order, paths = np.arange(depth), np.full((len(rows), steps, depth), -1)
        row, slot, column = np.nonzero(seen)
        paths[row, slot, (seen.cumsum(-1) - 1)[row, slot, column]] = column
        parents = np.where(order == (length - 2)[:, :, None], paths, 0).sum(-1)
        found = (self._ends[rows][:, None] == parents[:, :, None]) & (length > 1)[:, :, None]
        parent = np.where(found.any(-1), found.argmax(-1), -1)
        kept = np.where(parent < 0, 0, length - 1)
        copies = self._copies(rows, base, parent, kept, own)
        self.forget(rows)
        self._ends[rows, :steps], self._paths[rows, :steps, :depth] = paths.max(-1), paths

        new = (order >= kept[:, :, None]) & (order < length[:, :, None])
        sizes = (length - kept).ravel()
        table = np.repeat(self._table.table[rows], steps, axis=0)
        number = np.arange(table.shape[1]) - np.repeat(whole, steps)[:, None]  # of a page behind the shared ones
        there = (number >= 0) & (number < self.each)
        table[there] = own.reshape(-1, self.each)[np.nonzero(there)[0], number[there]]
        return Sequences(
            past=(base[:, None] + kept).ravel(),
            sizes=sizes,
            rows=np.repeat(np.repeat(rows, steps), sizes),
            columns=paths[new] + np.repeat(np.repeat(base, steps), sizes),
            pages=table[np.arange(table.shape[1]) < used.reshape(-1, 1)],
            used=used.ravel(),
            copies=copies,
        )

    def _copies(self, rows: Ints, base: Ints, parent: Ints, kept: Ints, own: Ints) -> list[tuple[int, int]]:
        """What the beams' pages `own` [R, S, each] begin with: their parents', or the page that the row's base is on.

        Args:
            parent: int64 [R, S], the slot that has the parent's pages; -1 where a path begins at the base.
            kept: int64 [R, S], columns of the path that these hold.
        """
        size = self._table.size
        begun = -(-((base % size)[:, None] + kept) // size)  # pages with something before the new tokens
        wanted = (np.arange(self.each) < begun[:, :, None]) & (parent != np.arange(own.shape[1]))[:, :, None]
        last = np.minimum(base // size, self._table.table.shape[1] - 1)
        root = self._table.table[rows, last][:, None, None]
        source = np.where(parent[:, :, None] < 0, root, self.pages(rows[:, None], parent))
        return list(zip(source[wanted].tolist(), own[wanted].tolist(), strict=True))

    def longest(self, rows: Ints, path: Ints) -> tuple[Ints, Ints]:
        """Which beam of each row has the most of a path [R, D] of columns from the base on, and how many of them."""
        depth = min(path.shape[1], self._paths.shape[2])
        held = self._paths[rows, :, :depth]
        same = (held == path[:, None, :depth]) & (held >= 0)
        lengths = same.cumprod(-1).sum(-1)
        return lengths.argmax(1), lengths.max(1)

    def _reserve(self, slots: int, each: int, depth: int) -> None:
        """Have room for so many beams of a row, pages of a beam, and columns of a path. More pages begin empty."""
        rows = len(self._ends)
        if slots > self.slots or each > self.each:
            self.slots, self.each = max(slots, self.slots), max(each, self.each)
            self._ends = np.full((rows, self.slots), -1)
            self._paths = np.full((rows, self.slots, self._paths.shape[2]), -1)
        if depth > self._paths.shape[2]:
            more = np.full((rows, self.slots, depth - self._paths.shape[2]), -1)
            self._paths = np.concatenate([self._paths, more], 2)
