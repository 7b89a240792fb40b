"""A pool of pages: which rows and kept prefixes hold which. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engines.base import KV_PAGE
from engines.cache.prefix import PrefixCache

Ints = NDArray[np.int64]
Adopt = Callable[[int, int, Sequence[int], Sequence[int]], None]
"""Lets a row's columns from one on, the first of a page, be those of pages: row, column, pages, tokens."""


class Pages:
    """A pool of pages that several rows may share; a shared page is never written.

    Args:
        count: pages in all.

    Attributes:
        users: rows and kept prefixes that hold each page.
    """

    def __init__(self, count: int) -> None:
        self.users = np.zeros(count, np.int64)
        self._free = list(range(count))[::-1]

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, more: int) -> None:
        self._free = [*range(len(self.users), len(self.users) + more)][::-1] + self._free
        self.users = np.concatenate([self.users, np.zeros(more, np.int64)])

    def take(self) -> int:
        page = self._free.pop()
        self.users[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                self._free.append(page)


class PageTable:
    """The pages of each row: page n of a row holds its columns n size .. (n + 1) size - 1.

    Args:
        rows, capacity: of the cache; the capacity is a multiple of `size`.
        size: columns of a page.
        count: pages of the pool; default: as many as all rows can fill.

    Attributes:
        pages: the pool.
        table: int32 [rows, capacity / size], of which each row's first `owned` are its own.
        owned: int64 [rows], pages of each row.
    """

    def __init__(self, rows: int, capacity: int, size: int, count: int | None = None) -> None:
        each = capacity // size
        self.size = size
        self.pages = Pages(rows * each if count is None else count)
        self.table = np.zeros((rows, each), np.int32)
        self.owned = np.zeros(rows, np.int64)

    def make_writable(self, row: int, start: int, end: int) -> list[tuple[int, int]]:
        """Give a row pages of its own for columns start .. end - 1; returns which pages to copy, (from, to)."""
        copies = list[tuple[int, int]]()
        owned, last = int(self.owned[row]), -(-end // self.size)
        for number in range(min(owned, start // self.size), last):
            shared = int(self.table[row, number])
            if number < owned and self.pages.users[shared] == 1:
                continue
            self.table[row, number] = page = self.pages.take()
            if number < owned:
                self.pages.release([shared])
                copies.append((shared, page))  # also where it begins with `start`, behind which a row may hold more
        self.owned[row] = max(owned, last)
        return copies

    def missing(self, rows: Ints, starts: Ints, ends: Ints) -> Ints:
        """Pages that `make_writable` would take from the pool for columns start .. end - 1, of each of these rows."""
        if not len(rows):
            return rows
        owned, last = self.owned[rows], -(-ends // self.size)
        first = np.minimum(owned, starts // self.size)
        numbers = np.arange(first.min(), last.max())
        asked = (numbers >= first[:, None]) & (numbers < last[:, None])
        shared = self.pages.users[self.table[rows, first.min() : last.max()]] > 1
        counts: Ints = (asked & (shared | (numbers >= owned[:, None]))).sum(1)
        return counts

    def pages_of(self, row: int, start: int, end: int) -> list[int]:
        """The pages of columns start .. end - 1 of a row."""
        return [int(page) for page in self.table[row, start // self.size : -(-end // self.size)]]

    def adopt(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Let a row's pages from column `start` on, a page's first, be these, which it shares."""
        self.pages.share(pages)
        first = start // self.size
        self.pages.release(self.table[row, first : self.owned[row]].tolist())
        self.table[row, first : first + len(pages)] = pages
        self.owned[row] = first + len(pages)

    def cut(self, row: int, start: int) -> list[int]:
        """Take the page of column `start` and those behind it from a row; returns those that nobody holds now."""
        first = start // self.size
        gone = self.table[row, first : self.owned[row]].tolist()
        self.pages.release(gone)
        self.owned[row] = min(self.owned[row], first)
        return [page for page in gone if not self.pages.users[page]]


class PagedPrefixCache(PrefixCache):
    """Kept prefixes that are pages of the engine's own pool: keeping and restoring them copies nothing.

    Args:
        table: the engine's, whose pool has room for `tokens` tokens more than its rows hold.
        tokens: tokens to keep at most; rounded down to pages of 64.
        adopt: the cache's.
    """

    def __init__(self, table: PageTable, tokens: int, adopt: Adopt) -> None:
        self._table, self._adopt, self._pages = table, adopt, dict[int, list[int]]()
        super().__init__(tokens // KV_PAGE)

    def load(self, slots: Sequence[int], row: int, start: int, tokens: Sequence[int]) -> None:
        self._adopt(row, start, [page for slot in slots for page in self._pages[slot]], tokens)

    def save(self, slot: int, row: int, start: int) -> None:
        self._table.pages.release(self._pages.get(slot, []))
        self._pages[slot] = self._table.pages_of(row, start, start + KV_PAGE)
        self._table.pages.share(self._pages[slot])

    def close(self) -> None:
        """Give all pages back to the table, which others keep prefixes of now; keep nothing from now on."""
        for pages in self._pages.values():
            self._table.pages.release(pages)
        self._pages.clear()
        self._table = PageTable(0, 0, KV_PAGE)
        super().__init__(0)
