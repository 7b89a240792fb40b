"""A paged cache addressed by columns: which tokens a step has to run again, and which pages its rows have.

Paged attention sees every column behind the new tokens, and a small mask among the new ones alone. A draft tree, whose
nodes do not see each other, therefore lies among the new tokens until the block is over: each step over a deeper level
runs the levels above once more. Nothing is ever moved: an accepted path that does not lie in place is run again, in its
place, by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engines.openvino.graph import PAGE
from engines.openvino.run import Run
from engines.pages import Ints, PageTable


class Columns:
    """What each column of each row holds, and where.

    Args:
        count: pages of the pool; default: as many as all rows can fill.

    Attributes:
        waiting: rows with columns that are known, and that the next run computes, whichever rows it is for.
    """

    def __init__(self, rows: int, capacity: int, count: int | None = None) -> None:
        self.table = PageTable(rows, capacity, PAGE, count)
        self.waiting: set[int] = set()
        self._tokens, self._positions = np.zeros((2, rows, capacity), np.int64)
        self._lead = np.zeros((rows, capacity), np.int64)  # columns from 0 on that a column's token sees
        self._stored = np.zeros(rows, np.int64)  # columns whose keys and values are right
        self._known = np.zeros(rows, np.int64)  # columns whose tokens are known
        self._base = np.zeros(rows, np.int64)  # where a tree begins: `_seen` is indexed from it, and all see all before
        self._seen = np.zeros((rows, 64, 64), np.bool_)  # what the columns from the base on see, from the base on

    def postpone(self, tokens: Ints, positions: Ints, start: int, row: int) -> list[tuple[int, int]]:
        """Let a row hold tokens [S] from column `start` on, each of which sees all before it.

        The next run computes them beside its step: many short runs cost more than one.

        Returns:
            pages to copy at once, (from, to).
        """
        end = self._learn(row, start, tokens, positions)
        self._stored[row] = min(self._stored[row], start)
        self._base[row] = min(self._base[row], start)
        self.waiting.add(row)
        return self.table.make_writable(row, int(self._stored[row]), end)

    def _learn(self, row: int, start: int, tokens: Ints, positions: Ints) -> int:
        """Let a row end with tokens [S] from column `start` on, each of which sees all before it; returns its end."""
        end = start + len(tokens)
        self._tokens[row, start:end], self._positions[row, start:end] = tokens, positions
        self._lead[row, start:end] = np.arange(start, end) + 1
        self._known[row] = end
        return end

    def follows(self, row: int, start: int) -> bool:
        """Whether a row holds all columns before `start`."""
        return bool(start <= self._known[row])

    def holds(self, row: int, tokens: Sequence[int]) -> bool:
        """Whether a row's columns from 0 on are stored, and are those of these tokens."""
        count = len(tokens)
        return bool(count <= self._stored[row]) and np.array_equal(self._tokens[row, :count], tokens)

    def plan(
        self, tokens: Ints, positions: Ints, write_at: Ints, mask: NDArray[np.bool_], keep: Ints, first_row: int
    ) -> Run:
        """The run of a step, whose arguments are those of `engines.base.Step`; the mask is [R, S, L].

        A row that begins behind the columns it has was not brought up to date, so nobody asks for its result: it is run
        as if it were, and changes no column that the row is known to hold.
        """
        count, steps = tokens.shape
        rows = np.arange(first_row, first_row + count)
        ends, at = write_at + steps, write_at[:, None] + np.arange(steps)
        lagging = write_at > self._known[rows]
        lead = np.where(mask.all(-1), at + 1, mask.argmin(-1))
        first, causal = lead.min(1), (lead > at).all(1) | lagging
        past = np.minimum(np.minimum(write_at, self._stored[rows]), first)
        past = np.maximum(past, np.minimum(self._base[rows], write_at))
        past[lagging] = write_at[lagging]
        begins_tree = (first >= write_at) & ~lagging
        # go back until no column that is run again needs one that is neither run again nor seen by all
        for number in np.flatnonzero((past < write_at) & ((past > self._base[rows]) | begins_tree)):
            row, start = rows[number], int(write_at[number])
            least = int(past[number])
            while (lower := max(min(least, int(self._lead[row, least:start].min())), int(self._base[row]))) < least:
                least = lower
            past[number] = least
            begins_tree[number] &= (self._lead[row, least:start] > np.arange(least, start)).all()
        self._base[rows] = np.where(begins_tree, write_at, self._base[rows])
        self._tokens[rows[:, None], at], self._positions[rows[:, None], at] = tokens, positions
        self._lead[rows[:, None], at] = lead
        self._remember(rows, write_at, mask, np.flatnonzero(~causal))
        self._stored[rows] = np.where(lagging, self._stored[rows], ends)
        self._known[rows] = np.where(lagging, self._known[rows], ends)
        beside = self._begin_waiting(set(rows.tolist()))
        self.waiting.intersection_update(rows[lagging].tolist())
        return self._run(rows, past, ends, steps, keep, lagging, beside)

    def _remember(self, rows: Ints, write_at: Ints, mask: NDArray[np.bool_], trees: Ints) -> None:
        """Keep what the step's tokens see of their trees, for `trees`, numbers among the rows."""
        if not len(trees):
            return
        of_step = np.arange(mask.shape[1])
        base, start = (each[trees, None, None] for each in (self._base[rows], write_at))
        end = start + len(of_step)
        size = int((end - base).max())
        self._reserve(size)
        columns = np.minimum(base + np.arange(size), end - 1)  # of a smaller tree the last one stands for the rest
        seen = mask[trees[:, None, None], of_step[:, None], columns] & (base + np.arange(size) < end)
        self._seen[rows[trees, None], (start - base)[:, 0] + of_step, :size] = seen

    def plan_waiting(self) -> Run:
        """The run of all rows that wait, and of nothing else."""
        none = np.zeros(0, np.int64)
        beside = self._begin_waiting(set())
        self.waiting.clear()
        return self._run(none, none, none, 0, none, none.astype(np.bool_), beside)

    def _begin_waiting(self, others: set[int]) -> tuple[Ints, Ints, Ints]:
        """What is stored from now on: the rows that wait, but for `others`, and which of their columns, from and to."""
        rows = np.array(sorted(self.waiting - others), np.int64)
        past, ends = self._stored[rows], self._known[rows]
        self._stored[rows] = ends
        return rows, past, ends

    def take_back(self, run: Run) -> None:
        """A run has failed: its rows do not hold what it was to store, and forget the step's own tokens."""
        self._known[run.rows] = np.minimum(self._known[run.rows], run.own)
        self._stored[run.rows] = np.minimum(self._stored[run.rows], run.past)
        self._base[run.rows] = np.minimum(self._base[run.rows], run.past)
        self.waiting |= set(run.rows[self._stored[run.rows] < self._known[run.rows]].tolist())

    def _run(
        self,
        rows: Ints,
        past: Ints,
        ends: Ints,
        steps: int,
        keep: Ints,
        lagging: NDArray[np.bool_],
        beside: tuple[Ints, Ints, Ints],
    ) -> Run:
        count, own = len(rows), np.concatenate([ends - steps, beside[2]])
        if len(beside[0]):
            rows, past, ends = (np.concatenate(both) for both in zip((rows, past, ends), beside, strict=True))
            lagging = np.concatenate([lagging, np.zeros(len(beside[0]), np.bool_)])
        sizes = ends - past
        begins = np.concatenate([[0], sizes.cumsum()])
        columns = np.arange(begins[-1]) + np.repeat(past - begins[:-1], sizes)
        at = np.repeat(rows, sizes), columns
        lacking = np.flatnonzero(self.table.missing(rows, past, ends)).tolist()
        copies = [pair for n in lacking for pair in self.table.make_writable(rows[n], past[n], ends[n])]
        used = -(-ends // PAGE)
        table = self.table.table[rows]
        causal = (self._lead[at] > columns) | np.repeat(lagging, sizes)
        sees, sees_begins = np.zeros(0, np.uint8), np.zeros(0, np.int32)
        if not causal.all():
            sees = self._sees(rows, past, sizes, causal).view(np.uint8)
            sees_begins = np.concatenate([[0], (sizes**2).cumsum()]).astype(np.int32)
        return Run(
            rows=rows,
            own=own,
            tokens=self._tokens[at][None],
            positions=self._positions[at][None],
            past=past.astype(np.int32),
            begins=begins.astype(np.int32),
            pages=table[np.arange(table.shape[1]) < used[:, None]],
            page_begins=np.concatenate([[0], used.cumsum()]).astype(np.int32),
            sees=sees,
            sees_begins=sees_begins,
            keep=(begins[1 : count + 1, None] - steps + keep).ravel(),
            copies=copies,
        )

    def _sees(self, rows: Ints, past: Ints, sizes: Ints, causal: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """What each row's columns past .. past + size - 1 see of themselves, flattened, row after row.

        Args:
            causal: of each of these columns, whether it sees all before it.
        """
        size, base = int(sizes[0]), self._base[rows]
        if (sizes == size).all() and (past == base).all():  # trees alike, run again from their roots
            trees = self._seen[rows, :size, :size]
            return np.where(causal.reshape(-1, size, 1), np.tri(size, dtype=np.bool_), trees).ravel()
        each = []
        for row, start, count, own, first in zip(
            rows, past, sizes, np.split(causal, sizes.cumsum()[:-1]), base, strict=True
        ):
            mask, (tree,) = np.tri(count, dtype=np.bool_), np.nonzero(~own)
            before = max(first - start, 0)
            mask[tree, before:] = self._seen[row, start - first + tree, start + before - first : start + count - first]
            each.append(mask.ravel())
        return np.concatenate(each)

    def _reserve(self, size: int) -> None:
        if size > self._seen.shape[1]:
            larger = 1 << (size - 1).bit_length()
            grown = np.zeros((len(self._seen), larger, larger), np.bool_)
            grown[:, : self._seen.shape[1], : self._seen.shape[1]] = self._seen
            self._seen = grown

    def pages_of(self, row: int, start: int, end: int) -> list[int]:
        """The pages of columns start .. end - 1 of a row, which are stored."""
        assert end <= self._stored[row], "a column is asked for that is not stored"
        return self.table.pages_of(row, start, end)

    def move(self, source: Ints, to: Ints) -> None:
        """What columns `source` [R, D] hold becomes what columns `to` are going to hold: a path, each behind the last.

        Nothing is copied; where a column changes, it is to be run again.
        """
        rows = np.arange(len(source))[:, None]
        self._tokens[rows, to], self._positions[rows, to] = self._tokens[rows, source], self._positions[rows, source]
        changed = np.where(source != to, to, self._tokens.shape[1])
        self._lead[rows, to] = np.where(source != to, to + 1, self._lead[rows, to])
        rows = rows[:, 0]
        self._stored[rows] = np.minimum(self._stored[rows], changed.min(1))

    def copy(self, source: int, to: int, columns: int) -> None:
        """Let a row begin with the first columns of another, whose pages it shares."""
        if source == to:
            return
        stored = min(columns, int(self._stored[source]))
        pages = self.pages_of(source, 0, stored)
        self.adopt(to, 0, pages, self._tokens[source, :stored], self._positions[source, :stored])
        rest = slice(stored, columns)  # is known, and is run again
        self._learn(to, stored, self._tokens[source, rest], self._positions[source, rest])

    def adopt(self, row: int, start: int, pages: Sequence[int], tokens: Ints, positions: Ints) -> None:
        """Let columns start .. start + len(tokens) - 1 of a row, from a page's first on, be those of these pages."""
        assert start <= self._stored[row], "columns would be missing before those that are adopted"
        self.table.adopt(row, start, pages)
        self._stored[row] = self._base[row] = self._learn(row, start, tokens, positions)
        self.waiting.discard(row)

    def cut(self, row: int, start: int) -> list[int]:
        """Forget what a row holds from column `start` on; returns its own pages that are to be zeroed.

        Of a page that goes on before `start`, the columns before are run again.
        """
        zeroed = self.table.cut(row, start)
        self._known[row] = min(self._known[row], start)
        self._stored[row] = min(self._stored[row], start // PAGE * PAGE)
        self._base[row] = min(self._base[row], self._stored[row])
        if self._stored[row] == self._known[row]:
            self.waiting.discard(row)
        return zeroed

    def missing(self, spans: Sequence[tuple[int, int]]) -> int:
        """Pages at most that a run over columns start .. end - 1 of the first rows takes from the pool."""
        starts, ends = np.array(spans).reshape(-1, 2).T
        rows = np.arange(len(spans))
        return int(self.table.missing(rows, np.minimum(starts, self._base[rows]), ends).sum())

    def check_integrity(self, others: Sequence[int] = ()) -> None:
        """Invariants of the pages; `others` are those that kept prefixes hold. Raises AssertionError."""
        self.table.check_integrity(others)
        assert (self._stored <= self._known).all(), "a column is stored whose token is not known"
        assert (self._base <= self._stored).all(), "a tree begins behind what is stored"
        assert all(self._stored[row] < self._known[row] for row in self.waiting), "a row waits for nothing"
