"""ONNX Runtime on the CPU, with the cache's rows packed as tightly as the longest of them allows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.nn.functional import pad

from engines.base import KV_PAGE, EngineSpec, Step, mask_length
from engines.onnx.engine import OnnxRuntimeEngine
from engines.prefix_cache import PrefixCache


class PackedEngine(OnnxRuntimeEngine):
    """The engine of a CPU: attention reads the cache where it lies.

    ONNX Runtime's Attention wants each row's columns right behind those of the row before. In a cache whose rows have
    room for the whole capacity these must first be copied, by a Slice of the keys and of the values in every layer,
    which takes a third of a step over 8 rows behind 3,072 columns. Here `kv` has only as many columns as a row needs,
    [layers, 2, rows, kv_heads, columns, head_dim] in the memory of all, so that there is nothing to leave out; it is
    laid out anew where that number changes, once in 64 tokens or so.
    """

    def __init__(self, folder: Path, spec: EngineSpec, threads: int) -> None:
        super().__init__(folder, spec, threads, model=without_slices(folder / "model.onnx"))
        self._memory, self._scratch = self.kv.flatten(2), False
        self._used = [0] * spec.rows
        """Columns of each row that may hold something that is still needed."""

    def step(self, step: Step) -> Tensor:
        length, rows = step.mask.shape[3], range(step.first_row, step.first_row + len(step.tokens))
        self._use(step.spans, step.first_row)
        needed, others = max(length, self._needed), any(n for row, n in enumerate(self._used) if row not in rows)
        self._lay_out(max(needed, self._columns_now) if others else needed)
        if length < self._columns_now:
            mask = pad(step.mask, (0, self._columns_now - length))
            step = replace(step, mask=mask, out=None)  # this mask does not come again
        return super().step(step)

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:
        self._use(spans, first_row)
        self._lay_out(max(self._needed, self._columns_now))

    def _use(self, spans: Sequence[tuple[int, int]], first_row: int) -> None:
        if self._scratch:
            self._used = [0] * self.spec.rows
        for row, (_, end) in enumerate(spans, first_row):
            self._used[row] = max(self._used[row], end)

    def copy_row(self, source: int, to: int, columns: int) -> None:
        super().copy_row(source, to, columns)
        self._used[to] = columns

    def clear_row(self, row: int, start: int = 0) -> None:
        super().clear_row(row, start)
        self._used[row] = min(self._used[row], start)

    def free_row(self, row: int) -> None:
        self._used[row] = 0

    @contextlib.contextmanager
    def kept(self, *columns: slice) -> Iterator[None]:
        """Whatever is run inside, the cache is afterwards what it was; inside, rows hold nothing.

        They have other memory there, which the system provides where it is written.
        """
        held = self.kv, self._memory, self._used, self._scratch
        blank = torch.from_numpy(np.zeros(self._memory.nbytes, np.uint8)).view(self._memory.dtype)
        self._memory, self._scratch = blank.view_as(self._memory), True
        self.kv = self._packed(self._columns_now)
        try:
            yield
        finally:
            self.kv, self._memory, self._used, self._scratch = held
            self._kept.clear()  # bindings keep the other memory

    def prefix_cache(self, tokens: int) -> PrefixCache:
        return _KeptPrompts(self, tokens)

    @property
    def _columns_now(self) -> int:
        return self.kv.shape[4]

    @property
    def _needed(self) -> int:
        return mask_length(max(self._used), self.spec.capacity)

    def _packed(self, columns: int) -> Tensor:
        """The first memory of each layer's keys and of its values, as rows of so many columns."""
        spec = self.spec
        shape = spec.rows, spec.kv_heads, columns, spec.head_dim
        return self._memory[:, :, : math.prod(shape)].view(spec.layers, 2, *shape)

    def _lay_out(self, columns: int) -> None:
        """Give each row so many columns: it keeps what it has in the first ones, and new ones are zeros."""
        if columns == self._columns_now:
            return
        before, self.kv = self.kv, self._packed(columns)
        if self._scratch:
            return
        both = min(columns, before.shape[4])
        for old, new in zip(before.flatten(0, 1), self.kv.flatten(0, 1), strict=True):
            values = old[:, :, :both].clone()  # they lie in the same memory
            new[:, :, :both] = values
            new[:, :, both:] = 0


class _KeptPrompts(PrefixCache):
    """Kept prefixes of an engine whose cache does not always lie in the same way."""

    def __init__(self, engine: PackedEngine, tokens: int) -> None:
        super().__init__(engine.kv, tokens)
        self._engine = engine

    def _load(self, slots: Sequence[int], row: int, first: int, tokens: Sequence[int]) -> None:
        self._engine.reserve([(0, first * KV_PAGE + len(tokens))], row)
        self._kv = self._engine.kv
        super()._load(slots, row, first, tokens)

    def _keep(self, slot: int, row: int, number: int) -> None:
        self._kv = self._engine.kv
        super()._keep(slot, row, number)


def without_slices(path: Path) -> bytes:
    """An exported graph that attends to all columns it is given, and takes rows of any number of columns."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    cache = {value.name for value in graph.output if value.name.startswith("present_")}
    sliced = {
        node.output[0]: node.input[0] for node in graph.node if node.op_type == "Slice" and node.input[0] in cache
    }
    nodes = [node for node in graph.node if node.output[0] not in sliced]
    for node in nodes:
        node.input[:] = [sliced.get(name, name) for name in node.input]
    del graph.node[:]
    graph.node.extend(nodes)
    for value in [*graph.input, *graph.output]:
        if value.name.startswith(("past_", "present_")):
            value.type.tensor_type.shape.dim[2].dim_param = "columns"
    serialized: bytes = model.SerializeToString()
    return serialized
