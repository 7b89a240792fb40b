"""Keys and values as the library's attention finds them: a pool of blocks, each with all layers of 64 columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.base import KV_PAGE, EngineSpec
from engines.cache.paged import EMPTY, OWN, SPARE, PageCache, slots


class BlockPool(PageCache):
    """Rows of pages, as the PyTorch engine's, laid out as the library's: [pages, layers, 2, kv_heads, 64, head_dim].

    An offset counts blocks of one layer's keys or values: those of page p begin at 2 p layers, and its values one block
    behind its keys (`cpp/tensorrt_llm/kernels/kvCacheUtils.h`, `plugins/gptAttentionPlugin/gptAttentionPlugin.cpp`).

    Args:
        spare: pages behind a row's capacity, all of them `SPARE`: what the widest step of a full row writes.

    Attributes:
        starts: of each row, the first column that was reserved last.
        layers: of the model.
        blocks: pages that a row's offsets have room for.
    """

    reads_mask = False

    def __init__(self, spec: EngineSpec, device: str, spare: int) -> None:
        super().__init__(spec, device)
        self.starts, self.layers = [0] * spec.rows, spec.layers
        self._spare, self.blocks = spare, spec.capacity // KV_PAGE + spare

    def new_pool(self, pages: int) -> Tensor:
        spec = self._spec
        shape = pages, spec.layers, 2, spec.kv_heads, KV_PAGE, spec.head_dim
        return torch.zeros(shape, dtype=spec.torch_dtype, device=self.device)

    def by_page(self, pool: Tensor) -> Tensor:
        return pool.permute(1, 2, 3, 0, 4, 5)

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:
        super().reserve(spans, first_row)
        self.starts[first_row : first_row + len(spans)] = [start for start, _ in spans]

    def keep(self, source: Tensor, to: Tensor) -> None:
        pages, rows = self.by_page(self.kv), self.page_table[: len(source)]
        found, place = slots(rows, source), slots(rows, to)
        moved = pages[:, :, :, found // KV_PAGE, found % KV_PAGE]
        pages[:, :, :, place // KV_PAGE, place % KV_PAGE] = moved

    def offsets(self, first_row: int, idle: Tensor) -> Tensor:
        """Offsets of keys and values of rows, int32 [R, 2, blocks]; idle ones, bool [R], have spare pages alone."""
        pages = self.page_table[first_row : first_row + len(idle), :-1].masked_fill(idle[:, None], SPARE)
        first = torch.nn.functional.pad(pages, (0, self._spare), value=SPARE) * (2 * self.layers)
        return torch.stack([first, first + 1], 1)

    def host_offsets(self, row: int) -> Tensor:
        """The same of one row on the host, as the host knows it: int32 [1, 2, blocks]."""
        pages = torch.full((self.blocks,), SPARE, dtype=torch.int32)
        if not self._discards:
            pages[: -self._spare] = EMPTY
            owned = int(self.table.owned[row])
            pages[:owned] = torch.from_numpy(self.table.table[row, :owned]) + OWN
        first = pages * (2 * self.layers)
        return torch.stack([first, first + 1])[None]


def spare_pages(tokens: int) -> int:
    """Pages behind the capacity that steps of so many tokens per row may reach."""
    return max(1, -(-(tokens - 1) // KV_PAGE))
