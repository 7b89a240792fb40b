"""OpenVINO's paged cache: the pages, and what has to wait until a run has filled them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.base import EngineSpec
from engines.cache.base import KvCache
from engines.cache.page_table import PagedPrefixCache
from engines.cache.prefix import PrefixCache
from engines.openvino.columns import Columns
from engines.openvino.graph import PAGE

Array = NDArray[Any]


class OpenVinoCache(KvCache):
    """A pool of pages of committed tokens, behind an account of columns (`engines.openvino.columns`).

    Columns that it has no more, because an accepted path did not lie in place, are run again by the next step.

    Args:
        ports: the graph's caches: inputs [pages, ...].
        bind: lets steps use pages, uint8 [pages, bytes of one], as the cache of a number.

    Attributes:
        columns: the account.
    """

    page_columns = PAGE

    def __init__(self, spec: EngineSpec, ports: Sequence[Any], bind: Callable[[int, Array], None]) -> None:
        self.rows, self.capacity, self._bind = spec.rows, spec.capacity, bind
        sizes = [[dim.get_length() for dim in list(port.partial_shape)[1:]] for port in ports]
        each = [int(np.prod(size)) * port.element_type.size for size, port in zip(sizes, ports, strict=True)]
        self._page_bytes, self.page_bytes = each, sum(each)
        self._prefixes: _KeptPrompts | None = None
        self.allocate_pages(spec.rows * spec.capacity // PAGE)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def blank(self) -> int:
        """The page that blanks are written to, behind those of the pool."""
        return len(self.columns.table.pages.users)

    def allocate_pages(self, num_pages: int) -> None:
        self.pages, self.columns = num_pages, Columns(self.rows, self.capacity, num_pages)
        self._caches: list[Array] = [np.zeros((0, size), np.uint8) for size in self._page_bytes]
        self._pool = 0  # pages of the pool that the caches have memory for
        self._late: list[tuple[int, Sequence[int], Callable[[], None]]] = []
        self._allocate()

    def grow(self) -> None:
        if min(map(len, self._caches)) <= self.blank + self.columns.beams.count:
            self._allocate()

    def _allocate(self) -> None:
        """Memory for the pool's pages, one more for blanks, and those of beams. The pool's keep what they hold.

        One cache after the other, so that no two are there twice, and each is bound to what it holds.
        """
        for number, before in enumerate(self._caches):
            raw = np.zeros((self.blank + 1 + self.columns.beams.count, before.shape[1]), np.uint8)
            raw[: self._pool] = before[: self._pool]
            self._caches[number] = raw
            self._bind(number, raw)
        self._pool = self.blank

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages, (from, to); all are read before any is written."""
        if copies:
            source, to = map(list, zip(*copies, strict=True))
            for cache in self._caches:
                cache[to] = cache[source]

    def when_stored(self, row: int, tokens: Sequence[int], work: Callable[[], None]) -> None:
        """Do this once a row's columns from 0 on are these tokens': now, or behind the run that computes them."""
        if self.columns.has_stored(row, tokens):
            work()
        else:
            self._late.append((row, tokens, work))

    def run_late(self) -> None:
        """After a run, do what waited for its columns; what waited for others is never done."""
        late, self._late = self._late, []
        for row, tokens, work in late:
            if self.columns.has_stored(row, tokens):
                work()

    def beam_pages(self, draft_len: int) -> int:
        return -(-(PAGE - 1 + draft_len) // PAGE)

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        return self.columns.fits(spans)

    def release(self, row: int) -> None:
        self.columns.cut(row, 0)

    def clear(self, row: int, start: int = 0) -> None:
        beams = self.columns.beams
        own = beams.pages(row, np.arange(beams.slots)).ravel()
        pages = [*self.columns.cut(row, start), *own[own < min(map(len, self._caches))].tolist()]
        for cache in self._caches:
            cache[pages] = 0

    def copy(self, source: int, to: int, columns: int) -> None:
        self.columns.copy(source, to, columns)

    def keep(self, source: Tensor, to: Tensor) -> None:
        self.copy_pages(self.columns.move(source.numpy(), to.numpy()))

    def prefix_cache(self, tokens: int) -> PrefixCache:
        if self._prefixes is not None:
            self._prefixes.close()
        self.columns.table.pages.grow(max(0, self.pages + tokens // PAGE - self.blank))
        self.columns.beams.forget(slice(None))  # their pages have other numbers now
        self._allocate()
        self._prefixes = _KeptPrompts(self, tokens)
        return self._prefixes

    def adopt(self, row: int, start: int, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Let columns `start` .. of a row be those of these pages, which hold these tokens."""
        self.columns.adopt(row, start, pages, np.array(tokens), np.arange(start, start + len(tokens)))


class _KeptPrompts(PagedPrefixCache):
    """Kept prefixes, which prompts join once they are computed."""

    def __init__(self, cache: OpenVinoCache, tokens: int) -> None:
        super().__init__(cache.columns.table, tokens, cache.adopt)
        self._when_stored = cache.when_stored

    def store(self, row: int, tokens: Sequence[int], salt: int = 0) -> None:
        self._when_stored(row, tokens, partial(super().store, row, tokens, salt))
