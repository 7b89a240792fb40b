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

from engines.base import EngineSpec, Step, mask_length
from engines.buffers import Slab
from engines.onnx.engine import OnnxRuntimeEngine

COPIED_AT_MOST = 0.25
"""Part of the cache that a step over rows shorter than others may copy; one that needs more reads what the longest row
needs."""


class PackedEngine(OnnxRuntimeEngine):
    """The engine of a CPU: attention reads the cache where it lies.

    ONNX Runtime's Attention wants each row's columns right behind those of the row before. In a cache whose rows have
    room for the whole capacity these must first be copied, by a Slice of the keys and of the values in every layer,
    which takes longer the longer the rows are. Here `kv` has only as many columns as the longest row needs,
    [layers, 2, rows, kv_heads, columns, head_dim] at the start of the memory for the whole capacity, so that there is
    nothing to leave out. It is laid out anew where that number changes: about once in 64 tokens, and where a longer row
    comes or goes. Only a step over few rows, such as a prompt, while another row holds more than they do,
    runs on a copy.
    """

    def __init__(self, folder: Path, spec: EngineSpec, threads: int) -> None:
        super().__init__(folder, spec, threads, model=without_slices(folder / "model.onnx"))
        self._memory, self._copy, self._mask = self.kv.flatten(2), Slab(), Slab()
        self._used = [0] * spec.rows
        """Columns of each row up to the last that was written: nobody needs one behind that."""
        self._forgets = False
        """Rows hold nothing from one step to the next, see `kept`."""

    def step(self, step: Step) -> Tensor:
        spans, rows = step.spans, range(step.first_row, step.first_row + len(step.tokens))
        self._use(spans, step.first_row)
        end = max(step.mask.shape[3], *(end for _, end in spans))  # padding may be written behind the mask
        columns, others = mask_length(end, self.spec.capacity), [n for at, n in enumerate(self._used) if at not in rows]
        if max(others, default=0) <= columns:
            self._lay_out(columns)
        elif len(rows) * columns <= COPIED_AT_MOST * self.spec.rows * self._columns_now:
            return self._apart(step, columns)
        return super().step(self._padded(step, self._columns_now))

    def _apart(self, step: Step, columns: int) -> Tensor:
        """Run a step on a copy of the first columns of its rows."""
        whole, first = self.kv, step.first_row
        own = whole[:, :, first : first + len(step.tokens), :, :columns]
        self.kv = self._copy.like(torch.empty(own.shape, dtype=own.dtype, device="meta")).copy_(own)
        try:
            logits = super().step(replace(self._padded(step, columns), first_row=0))
            for row, (start, end) in enumerate(step.spans):
                whole[:, :, first + row, :, start:end] = self.kv[:, :, row, :, start:end]
        finally:
            self.kv = whole
        return logits

    def _padded(self, step: Step, columns: int) -> Step:
        """The step with a mask of so many columns, in memory that is always the same."""
        length = step.mask.shape[3]
        if length == columns:
            return step
        mask = self._mask.like(torch.empty(*step.mask.shape[:3], columns, dtype=torch.bool, device="meta"))
        mask[..., :length], mask[..., length:] = step.mask, False
        return replace(step, mask=mask)

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:
        self._use(spans, first_row)
        self._lay_out(max(mask_length(max(self._used), self.spec.capacity), self._columns_now))

    def _use(self, spans: Sequence[tuple[int, int]], first_row: int) -> None:
        if self._forgets:
            self._used = [0] * self.spec.rows
        for row, (_, end) in enumerate(spans, first_row):
            self._enter(row)
            self._used[row] = end

    def _enter(self, row: int) -> None:
        """A row that is not used becomes zeros: what it was left with may be anything."""
        if not self._used[row] and not self._forgets:
            self.kv[:, :, row] = 0

    def copy_row(self, source: int, to: int, columns: int) -> None:
        self._enter(to)
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
        held = self.kv, self._memory, self._used, self._forgets
        blank = torch.from_numpy(np.zeros(self._memory.nbytes, np.uint8)).view(self._memory.dtype)
        self._memory, self._used, self._forgets = blank.view_as(self._memory), [0] * self.spec.rows, True
        self.kv = self._packed(self._columns_now)
        try:
            yield
        finally:
            self.kv, self._memory, self._used, self._forgets = held
            self._kept.clear()  # bindings keep the other memory

    @property
    def _columns_now(self) -> int:
        return self.kv.shape[4]

    def _packed(self, columns: int) -> Tensor:
        """The first memory of each layer's keys and of its values, as rows of so many columns."""
        spec = self.spec
        shape = spec.rows, spec.kv_heads, columns, spec.head_dim
        return self._memory[:, :, : math.prod(shape)].view(spec.layers, 2, *shape)

    def _lay_out(self, columns: int) -> None:
        """Give each row so many columns: a used one keeps what it has in the first ones, and new ones are zeros."""
        if columns == self._columns_now:
            return
        rows = max((row + 1 for row, used in enumerate(self._used) if used), default=0)
        both = min(columns, self._columns_now, max(self._used))
        moved = self.kv.new_empty(rows, self.spec.kv_heads, both, self.spec.head_dim)
        before, self.kv = self.kv, self._packed(columns)
        for old, new in zip(before.flatten(0, 1), self.kv.flatten(0, 1), strict=True) if not self._forgets else ():
            moved.copy_(old[:rows, :, :both])  # old and new are the same memory
            new[:rows, :, :both] = moved
            new[:rows, :, both:] = 0


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
