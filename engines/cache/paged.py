"""Rows that share a pool of pages: which pages they hold, on the host and as the device's kernels read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.base import KV_PAGE, EngineSpec
from engines.buffers import to_device
from engines.cache.base import KvCache
from engines.cache.page_table import PagedPrefixCache, PageTable
from engines.cache.prefix import PrefixCache

EMPTY, SPARE, OWN = range(3)
"""Numbers of pages. `EMPTY` stands for pages that a row does not have: it is zero and is never written. `SPARE` takes
what padded rows write, and no mask reaches it. `OWN` is the first page that rows can have."""


class PageCache(KvCache):
    """Rows find their columns by a table of pages. Nothing but a shared page is ever copied.

    The host takes pages before it launches what writes them (`reserve`), because a step on a device, or in a CUDA
    graph, cannot. The table that kernels read stays in one place and changes between launches only.

    Args:
        spec: of the engine.
        device: torch's name of where the pool lies.

    Attributes:
        reads_mask: whether steps read what a mask hides, see `engines.base.Engine`.
        table: the pages that each row holds, on the host.
        prefixes: kept prefixes of prompts, once `prefix_cache` was called.
        page_table: int32 [rows, capacity / 64 + 1], the numbers of each row's pages as kernels read them; the last
            column is `SPARE`, for all columns behind the capacity.
    """

    page_columns = KV_PAGE
    reads_mask = True

    def __init__(self, spec: EngineSpec, device: str = "cpu") -> None:
        self.rows, self.capacity, self._spec = spec.rows, spec.capacity, spec
        self.page_bytes = spec.kv_bytes * KV_PAGE // (spec.rows * spec.capacity)
        self.page_table = torch.zeros(spec.rows, spec.capacity // KV_PAGE + 1, dtype=torch.int32, device=device)
        self.page_table[:, -1] = SPARE
        self._kv: Tensor | None = None
        self.prefixes: PagedPrefixCache | None = None
        self._discards = False
        self.allocate_pages(spec.rows * spec.capacity // KV_PAGE)

    def allocate_pages(self, num_pages: int) -> None:
        self.pages = num_pages
        self.table = PageTable(self.rows, self.capacity, KV_PAGE, num_pages)

    @property
    def device(self) -> torch.device:
        return self.page_table.device

    @property
    def kv(self) -> Tensor:  # type: ignore[override]
        """The pool, see `new_pool`; allocated when it is first needed, and again when it has to grow."""
        pages, before = OWN + len(self.table.pages.users), self._kv
        count = 0 if before is None else self.by_page(before).shape[3]
        if count < pages:
            with torch.inference_mode(False):
                self._kv = self.new_pool(pages)
            if before is not None:
                self.by_page(self._kv)[:, :, :, :count] = self.by_page(before)
        assert self._kv is not None
        return self._kv

    def new_pool(self, pages: int) -> Tensor:
        """Zeros for so many pages, [layers, 2, kv_heads, pages x 64, head_dim]."""
        spec = self._spec
        shape = spec.layers, 2, spec.kv_heads, pages * KV_PAGE, spec.head_dim
        return torch.zeros(shape, dtype=spec.torch_dtype, device=self.device)

    def by_page(self, pool: Tensor) -> Tensor:
        """A view of the pool as [layers, 2, kv_heads, pages, 64, head_dim]."""
        return by_page(pool)

    def prefix_cache(self, tokens: int) -> PrefixCache:
        if self.prefixes is not None:
            self.prefixes.close()
        self.table.pages.grow(max(0, self.pages + tokens // KV_PAGE - len(self.table.pages.users)))
        self.prefixes = PagedPrefixCache(self.table, tokens, self._adopt)
        _ = self.kv  # allocated now, before anybody waits for it
        return self.prefixes

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        return int(self._missing(spans).sum()) <= self.table.pages.free

    def _missing(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> NDArray[np.int64]:
        return self.table.missing(first_row + np.arange(len(spans)), *np.array(spans).reshape(-1, 2).T)

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:
        if self._discards:
            return
        copies, new = list[tuple[int, int]](), list[int]()
        for number in np.flatnonzero(self._missing(spans, first_row)).tolist():
            row = first_row + number
            owned = self.table.owned[row]
            copies += self.table.make_writable(row, *spans[number])
            new += self.table.table[row, owned : self.table.owned[row]].tolist()
            self._show(row)
        if new and self.reads_mask:  # what others left in them may not be numbers: masked, it would still spread
            self.by_page(self.kv).index_fill_(3, to_device(new, self.device) + OWN, 0)
        if copies:
            source, to = to_device(np.array(copies).T + OWN, self.device)
            pages = self.by_page(self.kv)
            pages[:, :, :, to] = pages[:, :, :, source]

    def release(self, row: int) -> None:
        self.table.cut(row, 0)
        self._show(row)

    def copy(self, source: int, to: int, columns: int) -> None:
        if source != to:
            self._adopt(to, 0, self.table.pages_of(source, 0, columns)[: int(self.table.owned[source])], ())

    def clear(self, row: int, start: int = 0) -> None:
        if self._discards:
            return
        whole = -(-start // KV_PAGE)
        if whole * KV_PAGE > start and whole <= self.table.owned[row]:
            page = int(self.table.table[row, whole - 1])
            if self.table.pages.users[page] == 1:  # of one that is shared, the row has written nothing
                self.by_page(self.kv)[:, :, :, OWN + page, start % KV_PAGE :] = 0
        if gone := self.table.cut(row, whole * KV_PAGE):
            self.by_page(self.kv).index_fill_(3, to_device(gone, self.device) + OWN, 0)
        self._show(row)

    def keep(self, source: Tensor, to: Tensor) -> None:
        rows = self.page_table[: len(source)]
        self.kv[:, :, :, slots(rows, to)] = self.kv[:, :, :, slots(rows, source)]

    def discard_writes(self) -> None:
        self._discards = True
        self.page_table[:, :-1] = SPARE

    def reset(self) -> None:
        self._discards = False
        super().reset()

    def _adopt(self, row: int, start: int, pages: Sequence[int], tokens: Sequence[int]) -> None:
        self.table.adopt(row, start, pages)
        self._show(row)

    def _show(self, row: int) -> None:
        """Let the device know a row's pages, behind what it was given before and without waiting for it."""
        shown = self.table.table[row] + OWN
        shown[self.table.owned[row] :] = EMPTY
        self.page_table[row, :-1] = to_device(shown, self.device)


def slots(page_table: Tensor, columns: Tensor) -> Tensor:
    """Where in a pool columns int64 [R, N] of rows lie, int64 [R, N]; what lies behind all pages is in the last one."""
    page = (columns // KV_PAGE).clamp(max=page_table.shape[1] - 1)
    return page_table.gather(1, page).long() * KV_PAGE + columns % KV_PAGE


def gathered(pool: Tensor, page_table: Tensor) -> Tensor:
    """The columns of rows, [.., R, H, P x 64, D], of a pool [.., H, pages x 64, D]."""
    rows, pages = page_table.shape
    found = by_page(pool).flatten(-2).index_select(-2, page_table.flatten())  # pages, not numbers as by indexing
    return found.view(*pool.shape[:-2], rows, pages * KV_PAGE, pool.shape[-1]).transpose(-4, -3)


def by_page(pool: Tensor) -> Tensor:
    """A pool [.., pages x 64, D] as [.., pages, 64, D]."""
    return pool.view(*pool.shape[:-2], -1, KV_PAGE, pool.shape[-1])
