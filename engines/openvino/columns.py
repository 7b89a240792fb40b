"""A paged cache addressed by columns: which tokens a step has to run again, and which pages its rows have.

Paged attention sees every column before the new tokens, and a small mask among the new ones alone. So the cache holds
committed tokens only, in order. A draft tree whose nodes see each other lies among the new tokens of one step, and an
accepted path that does not lie in place is run again by the next. The levels of a draft, whose nodes do not, are
sequences of their own: see `engines.openvino.beams`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engines.cache.page_table import Ints, PageTable
from engines.openvino.beams import BeamPages, seen_from
from engines.openvino.graph import PAGE
from engines.openvino.run import Run, Sequences, blanks, texts_of


class Columns:
    """The token of each column of each row, and the page where its keys and values are.

    Args:
        count: pages of the pool; default: as many as all rows can fill.

    Attributes:
        deferred: rows with columns that are known, and that the next run computes, whichever rows it is for.
        beams: of drafts.
    """

    def __init__(self, rows: int, capacity: int, count: int | None = None) -> None:
        self._tokens, self._positions = np.zeros((2, rows, capacity), np.int64)  # first: too many rows end here
        self.table = PageTable(rows, capacity, PAGE, count)
        self.deferred: set[int] = set()
        self.beams = BeamPages(self.table)
        self._stored = np.zeros(rows, np.int64)  # columns whose keys and values are right
        self._known = np.zeros(rows, np.int64)  # columns whose tokens are known
        self._base = np.zeros(rows, np.int64)  # where the latest tree begins; its nodes see all columns before

    def defer(self, tokens: Ints, positions: Ints, start: int, row: int) -> list[tuple[int, int]]:
        """Let a row hold tokens [S] from column `start` on, each of which sees all before it.

        The next run computes them beside its step: many short runs cost more. Returns pages to copy now, (from, to).
        """
        end = self._learn(row, start, tokens, positions)
        self._stored[row] = min(self._stored[row], start)
        self._base[row] = min(self._base[row], start)
        self.beams.forget(row)
        self.deferred.add(row)
        return self.table.make_writable(row, int(self._stored[row]), end)

    def _learn(self, row: int, start: int, tokens: Ints, positions: Ints) -> int:
        """Let a row end with tokens [S] from column `start` on, each of which sees all before it; returns its end."""
        end = start + len(tokens)
        self._tokens[row, start:end], self._positions[row, start:end] = tokens, positions
        self._known[row] = end
        return end

    def follows(self, row: int, start: int) -> bool:
        """Whether the tokens of all columns of a row before `start` are known."""
        return bool(start <= self._known[row])

    def has_stored(self, row: int, tokens: Sequence[int]) -> bool:
        """Whether a row's columns from 0 on are stored, and are those of these tokens."""
        count = len(tokens)
        return bool(count <= self._stored[row]) and np.array_equal(self._tokens[row, :count], tokens)

    def plan(
        self, tokens: Ints, positions: Ints, write_at: Ints, mask: NDArray[np.bool_], keep: Ints, first_row: int
    ) -> Run:
        """The run of a step, whose arguments are those of `engines.base.Step`; the mask is [R, S, L].

        A row that begins behind the columns it has was not brought up to date, so its result is not used: it is run as
        if it were, and changes no column that the row is known to hold.
        """
        count, steps = tokens.shape
        rows = np.arange(first_row, first_row + count)
        ends, at = write_at + steps, write_at[:, None] + np.arange(steps)
        stored, lagging = self._stored[rows], write_at > self._known[rows]
        # A row is a text, whose tokens see all before them; a tree, whose tokens all see what is before the step; or
        # beams: a level of a draft, whose tokens see none of each other, or a deeper one, which misses columns before.
        lead = np.where(mask.all(-1), at + 1, mask.argmin(-1))  # columns from 0 on that each token sees
        is_text, is_first = (lead > at).all(1) | lagging, (lead >= write_at[:, None]).all(1)
        is_beams = ~is_text
        if is_beams.any():
            among = np.take_along_axis(mask, at[:, None], 2).sum(-1)  # of the step's own tokens; a blank slot sees none
            is_beams &= ~is_first | ((among <= 1).all(1) & (stored >= write_at))
        base = self._base[rows] = np.where(is_first & ~lagging, write_at, self._base[rows])
        assert (base <= stored)[is_beams].all(), "a draft goes on whose root is not stored"
        self._tokens[rows[:, None], at], self._positions[rows[:, None], at] = tokens, positions
        past = np.where(lagging, write_at, np.where(is_beams, base, np.minimum(write_at, stored)))
        self._stored[rows] = np.where(lagging, stored, np.where(is_beams, base, ends))
        self._known[rows] = np.where(lagging, self._known[rows], ends)
        self.beams.forget(rows[~is_beams])
        beside = self._begin_deferred(set(rows.tolist()))
        self.deferred.intersection_update(rows[lagging].tolist())
        return self._run(rows, past, ends, mask, keep, is_text, is_beams, beside)

    def plan_deferred(self) -> Run:
        """The run of all deferred rows, and of nothing else."""
        none = np.zeros(0, np.int64)
        beside = self._begin_deferred(set())
        self.deferred.clear()
        return self._run(none, none, none, np.zeros((0, 0, 0), np.bool_), none, none > 0, none > 0, beside)

    def _begin_deferred(self, others: set[int]) -> tuple[Ints, Ints, Ints]:
        """What is stored from now on: the deferred rows but for `others`, and which of their columns, from and to."""
        rows = np.array(sorted(self.deferred - others), np.int64)
        past, ends = self._stored[rows], self._known[rows]
        self._stored[rows] = ends
        return rows, past, ends

    def take_back(self, run: Run) -> None:
        """A run has failed: its rows do not hold what it was to store, and forget the step's own tokens."""
        self._known[run.rows] = np.minimum(self._known[run.rows], run.own)
        self._stored[run.rows] = np.minimum(self._stored[run.rows], run.stored)
        self._base[run.rows] = np.minimum(self._base[run.rows], run.stored)
        self.beams.forget(run.rows)
        self.deferred |= set(run.rows[self._stored[run.rows] < self._known[run.rows]].tolist())

    def _run(
        self,
        rows: Ints,
        past: Ints,
        ends: Ints,
        mask: NDArray[np.bool_],
        keep: Ints,
        is_text: NDArray[np.bool_],
        is_beams: NDArray[np.bool_],
        beside: tuple[Ints, Ints, Ints],
    ) -> Run:
        """The run: texts, a sequence per row; behind them the deferred rows; beams, one per node; and blanks."""
        count, steps, _ = mask.shape
        texts, drafts = np.flatnonzero(~is_beams), np.flatnonzero(is_beams)
        each = list[Sequences]()
        if len(texts) or len(beside[0]):
            own = rows[texts], past[texts], ends[texts]
            each.append(texts_of(self.table, *map(np.concatenate, zip(own, beside, strict=True))))
        if len(drafts):
            seen = seen_from(self._base[rows[drafts]], ends[drafts], mask[drafts])
            each.append(self.beams.extend(rows[drafts], self._base[rows[drafts]], seen))
        each += blanks(sum(int(sequences.sizes.sum()) for sequences in each), len(self.table.pages.users))
        joined = [np.concatenate(parts) for parts in list(zip(*each, strict=True))[:-1]]
        before, sizes, of_row, columns, pages, used = joined
        begins, at = np.concatenate([[0], sizes.cumsum()]).astype(np.int32), (of_row, columns)
        place = np.empty((count, steps), np.int64)  # of the step's own tokens among all
        place[texts] = begins[1 : len(texts) + 1, None] - steps + np.arange(steps)
        ends_of_beams = begins[1 + len(texts) + len(beside[0]) :][: len(drafts) * steps]
        place[drafts] = ends_of_beams.reshape(len(drafts), steps) - 1
        masks, mask_begins = np.zeros(0, np.uint8), np.zeros(0, np.int32)
        if len(trees := np.flatnonzero(~is_text[texts])):
            parts = [np.tri(size, dtype=np.bool_) for size in sizes.tolist()]
            for number, row in zip(trees.tolist(), texts[trees].tolist(), strict=True):
                parts[number][-steps:] = mask[row, :, past[row] : ends[row]]
            masks = np.concatenate([part.ravel() for part in parts]).view(np.uint8)
            mask_begins = np.concatenate([[0], (sizes**2).cumsum()]).astype(np.int32)
        return Run(
            rows=np.concatenate([rows, beside[0]]),
            own=np.concatenate([ends - steps, beside[2]]),
            stored=np.concatenate([past, beside[1]]),
            copies=[pair for sequences in each for pair in sequences.copies],
            feeds={
                "tokens": self._tokens[at][None],
                "positions": self._positions[at][None],
                "keep": place[:, keep].ravel(),
                "past_lens": before.astype(np.int32),
                "subsequence_begins": begins,
                "block_indices": pages,
                "block_indices_begins": np.concatenate([[0], used.cumsum()]).astype(np.int32),
                "qq_bias": masks,
                "qq_bias_begins": mask_begins,
                "max_context_len": (before + sizes).max().astype(np.int32),
            },
        )

    def move(self, source: Ints, to: Ints) -> list[tuple[int, int]]:
        """What columns `source` [R, D] hold becomes what columns `to` are going to hold: a path, each behind the last.

        What a beam holds of the path becomes the row's. Where a column changes besides, it is to be run again.
        Returns pages to copy at once, (from, to).
        """
        rows = np.arange(len(source))
        of_row, base = rows[:, None], self._base[rows]
        slots, lengths = self.beams.longest(rows, source - base[:, None])
        # what lies in place is either no beam's, or one token, which the next step runs again anyway
        lengths = np.where((source != to).any(1) & (to[:, 0] == base), lengths, 0)
        ends, copies = base + lengths, list[tuple[int, int]]()
        for row in np.flatnonzero(lengths).tolist():
            start, end = int(base[row]), int(ends[row])
            self.table.make_writable(row, start, end)  # a beam's pages have the columns before as well
            pages = self.table.pages_of(row, start, end)
            copies += zip(self.beams.pages(row, slots[row])[: len(pages)].tolist(), pages, strict=True)
        changed = np.where(source != to, to, self._tokens.shape[1]).min(1)
        self._stored[rows] = np.where(lengths > 0, ends, np.minimum(self._stored[rows], changed))
        for values in (self._tokens, self._positions):
            values[of_row, to] = values[of_row, source]
        self.beams.forget(rows)
        return copies

    def copy(self, source: int, to: int, columns: int) -> None:
        """Let a row begin with the first columns of another, whose pages it shares."""
        if source == to:
            return
        stored = min(columns, int(self._stored[source]))
        pages = self.table.pages_of(source, 0, stored)
        self.adopt(to, 0, pages, self._tokens[source, :stored], self._positions[source, :stored])
        rest = slice(stored, columns)  # is known, and is run again
        self._learn(to, stored, self._tokens[source, rest], self._positions[source, rest])
        if source in self.deferred and stored < columns:
            self.deferred.add(to)

    def adopt(self, row: int, start: int, pages: Sequence[int], tokens: Ints, positions: Ints) -> None:
        """Let columns start .. start + len(tokens) - 1 of a row, from a page's first on, be those of these pages."""
        assert start <= self._stored[row], "columns would be missing before those that are adopted"
        self.table.adopt(row, start, pages)
        self.beams.forget(row)
        self._stored[row] = self._base[row] = self._learn(row, start, tokens, positions)
        self.deferred.discard(row)

    def cut(self, row: int, start: int) -> list[int]:
        """Forget the columns of a row from `start` on; returns its own pages that are to be zeroed.

        Where a page begins before `start`, its columns before that are run again.
        """
        zeroed = self.table.cut(row, start)
        self._known[row] = min(self._known[row], start)
        self._stored[row] = min(self._stored[row], start // PAGE * PAGE)
        self._base[row] = min(self._base[row], self._stored[row])
        self.beams.forget(row)
        if self._stored[row] == self._known[row]:
            self.deferred.discard(row)
        return zeroed

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether the pool has the pages that a run over columns start .. end - 1 of the first rows may take."""
        free, base = self.table.pages.free, self._base[: len(spans)].tolist()
        starts = [min(start, at) for (start, _), at in zip(spans, base, strict=True)]
        ends = [end for _, end in spans]
        if sum((end - start) // PAGE + 2 for start, end in zip(starts, ends, strict=True)) <= free:
            return True  # whichever of them the rows have
        return int(self.table.missing(np.arange(len(spans)), np.array(starts), np.array(ends)).sum()) <= free
