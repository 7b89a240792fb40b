"""Beams of drafts as sequences of their own: each has a few pages behind the row's, and its path lies there in place.

A level of a draft is a step over nodes that do not see each other. Each node continues its parent's sequence by one
token, in pages that begin as a copy of the parent's; the full pages of the row itself are shared by all its beams. An
example: a row has 40 committed columns, so columns 32 to 39 lie on its second page. Each beam has a copy of that page,
and the path of the beam goes on from column 40 of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engines.cache.page_table import Ints, PageTable
from engines.openvino.run import Sequences


class BeamPages:
    """Which path each beam of the rows' latest steps holds, and in which pages.

    Args:
        table: of the rows. Beams' pages have numbers from 2 behind its pool's last on: the one between is for blanks.

    Attributes:
        slots: beams of a row that there are pages for.
        per_beam: pages of a beam.
    """

    def __init__(self, table: PageTable) -> None:
        self._table, self.slots, self.per_beam = table, 1, 1
        # the columns of the path that each beam holds, counted from the base on, and -1 behind them
        self._paths = np.full((len(table.table), 1, 1), -1)

    @property
    def count(self) -> int:
        return len(self._paths) * self.slots * self.per_beam

    def forget(self, rows: Ints | int | slice) -> None:
        self._paths[rows] = -1

    def pages(self, rows: Ints | int, slots: Ints | int) -> Ints:
        """The pages of beams: one more axis than `rows` and `slots` have together."""
        beams = np.asarray(rows * self.slots + slots)
        first: Ints = len(self._table.pages.users) + 1 + beams * self.per_beam
        return first[..., None] + np.arange(self.per_beam)

    def extend(self, rows: Ints, base: Ints, seen: NDArray[np.bool_]) -> Sequences:
        """Continue beams by a token each: R x S sequences, row by row.

        A path whose parent was not among the beams of the row's last step is run again from the base on.

        Args:
            rows: int64 [R].
            base: int64 [R], where each row's draft begins; all that is before is stored.
            seen: [R, S, T], which of the columns from the base on each node sees. The last one is its own.
        """
        size, length, steps = self._table.size, seen.sum(-1), seen.shape[1]
        depth, shared = int(length.max()), base // size  # `shared`: pages of the row that its beams begin with
        used = -(-(base[:, None] + length) // size)
        self._reserve(steps, int((used - shared[:, None]).max()), depth)
        own, order, paths = self.pages(rows[:, None], np.arange(steps)), np.arange(depth), _paths(seen, length)
        parent = self._parents(rows, paths, length)
        kept = np.where(parent < 0, 0, length - 1)
        copies = self._copies(rows, base, parent, kept, own)
        self.forget(rows)
        self._paths[rows, :steps, :depth] = paths

        new = (order >= kept[:, :, None]) & (order < length[:, :, None])
        sizes = (length - kept).ravel()
        table = np.repeat(self._table.table[rows], steps, axis=0)
        number = np.arange(table.shape[1]) - np.repeat(shared, steps)[:, None]  # of a page behind the shared ones
        there = (number >= 0) & (number < self.per_beam)
        table[there] = own.reshape(-1, self.per_beam)[np.nonzero(there)[0], number[there]]
        return Sequences(
            past=(base[:, None] + kept).ravel(),
            sizes=sizes,
            rows=np.repeat(np.repeat(rows, steps), sizes),
            columns=paths[new] + np.repeat(np.repeat(base, steps), sizes),
            pages=table[np.arange(table.shape[1]) < used.reshape(-1, 1)],
            used=used.ravel(),
            copies=copies,
        )

    def _parents(self, rows: Ints, paths: Ints, length: Ints) -> Ints:
        """The slot that holds each path [R, S, D] but for its last column: int64 [R, S], -1 where there is none."""
        before = np.where(np.arange(paths.shape[2]) == (length - 2)[:, :, None], paths, 0).sum(-1)
        ends = self._paths[rows].max(-1)
        same = (ends[:, None] == before[:, :, None]) & (length > 1)[:, :, None]
        found: Ints = np.where(same.any(-1), same.argmax(-1), -1)
        return found

    def _copies(self, rows: Ints, base: Ints, parent: Ints, kept: Ints, own: Ints) -> list[tuple[int, int]]:
        """What the beams' pages `own` [R, S, each] begin with: their parents', or the page that the row's base is on.

        Args:
            parent: int64 [R, S], the slot that has the parent's pages; -1 where a path begins at the base.
            kept: int64 [R, S], columns of the path that these hold.
        """
        size = self._table.size
        begun = -(-((base % size)[:, None] + kept) // size)  # pages with something before the new tokens
        wanted = (np.arange(self.per_beam) < begun[:, :, None]) & (parent != np.arange(own.shape[1]))[:, :, None]
        root = self._table.table[rows, base // size][:, None, None]
        source = np.where(parent[:, :, None] < 0, root, self.pages(rows[:, None], parent))
        return list(zip(source[wanted].tolist(), own[wanted].tolist(), strict=True))

    def longest(self, rows: Ints, path: Ints) -> tuple[Ints, Ints]:
        """Which beam of each row has the most of a path [R, D] of columns from the base on, and how many of them."""
        depth = min(path.shape[1], self._paths.shape[2])
        paths = self._paths[rows, :, :depth]
        same = (paths == path[:, None, :depth]) & (paths >= 0)
        lengths = same.cumprod(-1).sum(-1)
        return lengths.argmax(1), lengths.max(1)

    def _reserve(self, slots: int, per_beam: int, depth: int) -> None:
        rows, _, before = self._paths.shape
        if slots > self.slots or per_beam > self.per_beam:
            self.slots, self.per_beam = max(slots, self.slots), max(per_beam, self.per_beam)
            self._paths = np.full((rows, self.slots, before), -1)
        if depth > before:
            self._paths = np.pad(self._paths, ((0, 0), (0, 0), (0, depth - before)), constant_values=-1)


def _paths(seen: NDArray[np.bool_], length: Ints) -> Ints:
    """The columns that each node sees [R, S, T], one behind the other, int64 [R, S, D]; -1 beyond its `length`."""
    paths = np.full((*length.shape, int(length.max())), -1)
    row, slot, column = np.nonzero(seen)
    paths[row, slot, (seen.cumsum(-1) - 1)[row, slot, column]] = column
    return paths


def seen_from(base: Ints, ends: Ints, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of the columns base .. end - 1, of bounds [R], each token of a mask [R, S, L] sees: [R, S, T].

    A slot without a beam does not see itself. Its result is not used, so it is run as a token behind the base.
    """
    columns = base[:, None] + np.arange(int((ends - base).max()))
    inside = np.minimum(columns, ends[:, None] - 1)
    seen = np.take_along_axis(mask, inside[:, None], 2) & (columns < ends[:, None])[:, None]
    own = columns[:, None] == (ends[:, None] - mask.shape[1] + np.arange(mask.shape[1]))[:, :, None]
    return np.where((seen & own).any(-1, keepdims=True), seen, own)
