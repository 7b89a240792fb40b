"""Rows of columns in one array, which a step writes in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engines.base import KV_PAGE, EngineSpec, Step, mask_length
from engines.buffers import Arena
from engines.cache.base import KvCache
from engines.cache.prefix import PrefixCache

MAX_COPIED = 0.25
"""Part of a packed cache that a step over shorter rows may copy; one that needs more reads what the longest needs."""


class ColumnCache(KvCache):
    """Each row has room for the whole capacity, zeroed at allocation: a NaN in a masked column would poison the row.

    ONNX Runtime's attention on CPUs wants each row's columns right behind those of the row before; of rows that have
    room for the whole capacity it would copy what they hold, in every layer. So a *packed* cache has only as many
    columns as the longest row needs, at the start of the same memory. It is laid out anew where that number changes:
    about once in 64 tokens, and where a longer row comes or goes. Only a step over few rows, such as a prompt, while
    another row holds more than they do, runs on a copy.

    Attributes:
        kv: [layers, 2, rows, kv_heads, columns, head_dim], keys at index 0 of the second axis; `columns` is the
            capacity, of a packed cache what its longest row needs.
    """

    def __init__(self, spec: EngineSpec, device: str = "cpu", packed: bool = False) -> None:
        self.rows, self.capacity, self._packed = spec.rows, spec.capacity, packed
        shape = (spec.layers, 2, spec.rows, spec.kv_heads, spec.capacity, spec.head_dim)
        self.kv = torch.zeros(shape, dtype=spec.torch_dtype, device=device)
        self._memory, self._copy = self.kv.flatten(2), Arena()
        self._move: Callable[[Tensor, Tensor], None] | None = None
        self._used = [0] * spec.rows  # columns up to the last that was written: nobody needs one behind that

    @property
    def device(self) -> torch.device:
        return self.kv.device

    def of(self, step: Step) -> Tensor:
        """The rows of a step, where they lie: [layers, 2, R, kv_heads, columns, head_dim]."""
        return self.kv[:, :, step.first_row : step.first_row + len(step.tokens)]

    def prepare(self, step: Step) -> Tensor | None:
        """Make room for what a step writes to a packed cache.

        Returns:
            a copy of its rows for it to run on, which `write_back` takes, where others have far more columns than it
            needs; None where it runs on the rows themselves.
        """
        self._mark_used(spans := step.spans, step.first_row)
        end = max(step.mask.shape[3], *(end for _, end in spans))  # padding may be written behind the mask
        columns = mask_length(end, self.capacity)
        if max(self._used) <= columns:
            self._lay_out(columns)
        elif len(spans) * columns <= MAX_COPIED * self.rows * self.kv.shape[4]:
            own = self.of(step)[..., :columns, :]
            copy: Tensor = self._copy.view_like(torch.empty(own.shape, dtype=own.dtype, device="meta"))
            return copy.copy_(own)
        return None

    def write_back(self, step: Step, copy: Tensor) -> None:
        """Take over what a step wrote to a copy of its rows."""
        for row, (start, end) in enumerate(step.spans):
            self.kv[:, :, step.first_row + row, :, start:end] = copy[:, :, row, :, start:end]

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:
        if self._packed:
            self._mark_used(spans, first_row)
            self._lay_out(max(mask_length(max(self._used), self.capacity), self.kv.shape[4]))

    def release(self, row: int) -> None:
        if self._packed:
            self._used[row] = 0  # it becomes zeros when it is used again
        else:
            self.clear(row)

    def clear(self, row: int, start: int = 0) -> None:
        self.kv[:, :, row, :, start:] = 0
        self._used[row] = min(self._used[row], start)

    def copy(self, source: int, to: int, columns: int) -> None:
        self._clear_if_unused(to)
        self.kv[:, :, to, :, :columns] = self.kv[:, :, source, :, :columns]
        self._used[to] = columns

    def keep(self, source: Tensor, to: Tensor) -> None:
        self._move = self._move or column_mover(self.kv)
        self._move(source, to)

    def prefix_cache(self, tokens: int) -> PrefixCache:
        return ColumnPrefixCache(self, tokens)

    def _mark_used(self, spans: Sequence[tuple[int, int]], first_row: int) -> None:
        for row, (_, end) in enumerate(spans, first_row):
            self._clear_if_unused(row)
            self._used[row] = end

    def _clear_if_unused(self, row: int) -> None:
        """A row that is not used becomes zeros: what it was left with may be anything."""
        if self._packed and not self._used[row]:
            self.kv[:, :, row] = 0

    def _lay_out(self, columns: int) -> None:
        """Give each row so many columns: a used one keeps what it has in the first ones, and new ones are zeros."""
        layers, pair, count, heads, before, dim = self.kv.shape
        if columns == before:
            return
        from mtad import step_inputs  # numba is imported where a model runs, not where its folder is read

        rows = max((row + 1 for row, used in enumerate(self._used) if used), default=0)
        memory, per_column = self._memory.flatten(0, 1).view(torch.uint8).numpy(), dim * self.kv.element_size()
        held = min(columns, before, max(self._used))
        step_inputs.lay_out(memory, rows, heads, *(per_column * count for count in (before, columns, held)))
        shape = count, heads, columns, dim
        self._move, self.kv = None, self._memory[:, :, : math.prod(shape)].view(layers, pair, *shape)


class ColumnPrefixCache(PrefixCache):
    """Kept prefixes of a cache of columns: copies of them, in memory that is allocated at once."""

    def __init__(self, cache: ColumnCache, tokens: int) -> None:
        layers, pair, _, heads, _, dim = cache.kv.shape
        count, size = tokens // KV_PAGE, (layers, pair, heads, KV_PAGE, dim)
        self._cache, self._pool = cache, torch.zeros(count, *size, dtype=cache.kv.dtype, device=cache.device)
        super().__init__(count)

    def load(self, slots: Sequence[int], row: int, start: int, tokens: Sequence[int]) -> None:
        self._cache.reserve([(start, start + len(tokens))], row)
        for number, slot in enumerate(slots):
            at = start + number * KV_PAGE
            self._cache.kv[:, :, row, :, at : at + KV_PAGE] = self._pool[slot]

    def save(self, slot: int, row: int, start: int) -> None:
        self._pool[slot] = self._cache.kv[:, :, row, :, start : start + KV_PAGE]


def column_mover(kv: Tensor) -> Callable[[Tensor, Tensor], None]:
    """`KvCache.keep` of an array of columns, [layers, 2, rows, kv_heads, capacity, head_dim]."""
    if kv.device.type != "cpu" or kv.shape[-1] * kv.element_size() % 8:
        return partial(index_columns, kv)
    from mtad import step_inputs  # numba is imported where a model runs, not where its folder is read

    words = kv.flatten(0, 1).permute(1, 3, 0, 2, 4).view(torch.int64).numpy()
    return lambda source, to: step_inputs.move_columns(words, source.numpy(), to.numpy())


def index_columns(kv: Tensor, source: Tensor, to: Tensor) -> None:
    """The same by torch's indexing, which a CUDA graph can hold."""
    at = torch.arange(source.shape[0], device=kv.device)[:, None]
    kv[:, :, at, :, to] = kv[:, :, at, :, source]


def write_columns(kv: Tensor, new: Tensor, write_at: Tensor) -> None:
    """Write the columns of a step, for models that return them instead of writing them.

    Args:
        kv: [layers, 2, R, kv_heads, capacity, head_dim], the step's rows of the cache, changed in place.
        new: [layers, 2, R, kv_heads, S, head_dim].
        write_at: int64 [R], first column of each row.
    """
    rows, steps = new.shape[2], new.shape[4]
    columns = write_at[:, None] + torch.arange(steps, device=write_at.device)
    at = torch.arange(rows, device=write_at.device)[:, None]
    kv[:, :, at, :, columns] = new.permute(2, 4, 0, 1, 3, 5)
