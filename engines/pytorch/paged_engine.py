"""Engines whose rows share a pool of pages: which pages rows hold, on the host and as the device's kernels read it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.base import KV_PAGE, Engine, EngineSpec, Step
from engines.buffers import sent
from engines.pages import PagedPrefixCache, PageTable
from engines.prefix_cache import PrefixCache
from engines.pytorch.paged_cache import by_page, slots

EMPTY, SPARE, OWN = range(3)
"""Numbers of pages. `EMPTY` stands for pages that a row does not have: it is zero and is never written. `SPARE` takes
what padded rows write, and no mask reaches it. `OWN` is the first page that rows can have."""


class PagedEngine(Engine):
    """The cache of an engine that finds a row's columns by a table of pages. Nothing but a shared page is ever copied.

    The host takes pages before it launches what writes them (`reserve`), because a step on a device, or in a CUDA
    graph, cannot. The table that kernels read stays in one place and changes between launches only.

    Args:
        spec, device: see `engines.base.Engine`.

    Attributes:
        table: the pages that each row holds, on the host.
        page_table: int32 [rows, capacity / 64 + 1], the numbers of each row's pages as kernels read them; the last
            column is `SPARE`, for all columns behind the capacity.
    """

    page_columns = KV_PAGE

    def __init__(self, spec: EngineSpec, device: str = "cpu") -> None:
        self.spec = spec
        self.page_bytes = spec.kv_bytes * KV_PAGE // (spec.rows * spec.capacity)
        self.page_table = torch.zeros(spec.rows, spec.capacity // KV_PAGE + 1, dtype=torch.int32, device=device)
        self.page_table[:, -1] = SPARE
        self._kv: Tensor | None = None
        self._prefixes: PagedPrefixCache | None = None
        self._lent = False
        self.limit(spec.rows * spec.capacity // KV_PAGE)

    def limit(self, pages: int) -> None:
        self.pages = pages
        self.table = PageTable(self.spec.rows, self.spec.capacity, KV_PAGE, pages)

    @property
    def device(self) -> torch.device:
        return self.page_table.device

    @property
    def kv(self) -> Tensor:  # type: ignore[override] # its axes are not those of a cache of rows
        """The pool, [layers, 2, kv_heads, pages x 64, head_dim]; allocated, with zeros, when it is first needed."""
        spec, columns = self.spec, (OWN + len(self.table.pages.users)) * KV_PAGE
        before = self._kv
        if before is None or before.shape[3] < columns:
            shape = spec.layers, 2, spec.kv_heads, columns, spec.head_dim
            with torch.inference_mode(False):
                self._kv = torch.zeros(shape, dtype=spec.torch_dtype, device=self.device)
            if before is not None:
                self._kv[:, :, :, : before.shape[3]] = before
        assert self._kv is not None
        return self._kv

    def prefix_cache(self, tokens: int) -> PrefixCache:
        """Kept prefixes, which take the place of those of an earlier call."""
        if self._prefixes is not None:
            self._prefixes.close()
        more = self.pages + tokens // KV_PAGE - len(self.table.pages.users)
        self.table.pages.grow(max(0, more))
        self._prefixes = PagedPrefixCache(self.table, tokens, self.page_bytes, self._adopt)
        _ = self.kv  # allocated now, before anybody waits for it
        return self._prefixes

    def step(self, step: Step) -> Tensor:
        self.reserve(step.spans, step.first_row)
        return self.launch(step)

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        return int(self._missing(spans).sum()) <= self.table.pages.free

    def lacks(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> bool:
        """Whether `reserve` has anything to do."""
        return bool(self._missing(spans, first_row).any())

    def _missing(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> NDArray[np.int64]:
        """Pages that each of consecutive rows would take for its columns."""
        return self.table.missing(first_row + np.arange(len(spans)), *np.array(spans).reshape(-1, 2).T)

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:
        if self._lent:
            return
        copies, new = list[tuple[int, int]](), list[int]()
        for number in np.flatnonzero(self._missing(spans, first_row)).tolist():
            row = first_row + number
            owned = self.table.owned[row]
            copies += self.table.make_writable(row, *spans[number])
            new += self.table.table[row, owned : self.table.owned[row]].tolist()
            self._show(row)
        if new and self.reads_mask:  # what others left in them may not be numbers: masked, it would still spread
            by_page(self.kv).index_fill_(3, sent(new, self.device) + OWN, 0)
        if copies:
            source, to = sent(np.array(copies).T + OWN, self.device)
            pages = by_page(self.kv)
            pages[:, :, :, to] = pages[:, :, :, source]

    def free_row(self, row: int) -> None:
        self.table.cut(row, 0)
        self._show(row)

    def copy_row(self, source: int, to: int, columns: int) -> None:
        if source != to:
            self.table.adopt(to, 0, self.table.pages_of(source, 0, columns)[: int(self.table.owned[source])])
            self._show(to)

    def clear_row(self, row: int, start: int = 0) -> None:
        if self._lent:
            return
        whole = -(-start // KV_PAGE)
        if whole * KV_PAGE > start and whole <= self.table.owned[row]:
            page = int(self.table.table[row, whole - 1])
            if self.table.pages.users[page] == 1:  # of one that is shared, the row has written nothing
                by_page(self.kv)[:, :, :, OWN + page, start % KV_PAGE :] = 0
        if gone := self.table.cut(row, whole * KV_PAGE):
            by_page(self.kv).index_fill_(3, sent(gone, self.device) + OWN, 0)
        self._show(row)

    def move_columns(self, source: Tensor, to: Tensor) -> None:
        rows = self.page_table[: len(source)]
        self.kv[:, :, :, slots(rows, to)] = self.kv[:, :, :, slots(rows, source)]

    @contextlib.contextmanager
    def kept(self, *columns: slice) -> Iterator[None]:
        """Whatever is launched inside, the cache is afterwards what it was, if nothing else is written.

        Inside, rows seem to have pages all over the pool, but for these columns, which lie in a page that nobody needs.
        """
        rows, count = self.table.table.shape
        shown = np.arange(rows * count).reshape(rows, count) % len(self.table.pages.users) + OWN
        for part in columns:
            start, end, _ = part.indices(self.spec.capacity)
            shown[:, start // KV_PAGE : -(-end // KV_PAGE)] = SPARE
        self.page_table[:, :-1] = sent(shown, self.device)
        self._lent = True
        try:
            yield
        finally:
            self._lent = False
            for row in range(rows):
                self._show(row)

    def check_integrity(self) -> None:
        """The device's table is the host's; raises AssertionError."""
        owned = np.arange(self.page_table.shape[1] - 1) < self.table.owned[:, None]
        expected = np.where(owned, self.table.table + OWN, EMPTY)
        assert np.array_equal(self.page_table[:, :-1].cpu().numpy(), expected), "kernels read another table"

    def _adopt(self, row: int, start: int, pages: Sequence[int], tokens: Sequence[int]) -> None:
        self.table.adopt(row, start, pages)
        self._show(row)

    def _show(self, row: int) -> None:
        """Let the device know a row's pages, behind what it was given before and without waiting for it."""
        shown = self.table.table[row] + OWN
        shown[self.table.owned[row] :] = EMPTY
        self.page_table[row, :-1] = sent(shown, self.device)
