"""Caches of fixed size as transformers sees them: new keys and values go to columns that the step names.

The engine writes in place; the exporter writes by ONNX operators, or to copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from engines.pytorch.layer_ops import Turn, store_columns
from mtad.errors import InvalidInput

Scatter = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(buffer [R, H, C, D], new [R, H, S, D], write_at [R]) -> buffer with S columns of each row replaced."""


def scatter_in_place(buffer: Tensor, new: Tensor, write_at: Tensor) -> Tensor:
    """Write `new` at columns write_at[r] .. + S of each row of `buffer`, in place."""
    return buffer.scatter_(2, _columns(new, write_at), new)


def _columns(new: Tensor, write_at: Tensor) -> Tensor:
    columns = write_at[:, None] + torch.arange(new.shape[2], device=new.device)
    return columns[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])


def scatter_operator(buffer: Tensor, new: Tensor, write_at: Tensor) -> Tensor:
    """The same as an ONNX `TensorScatter` node."""
    return torch.onnx.ops.symbolic(
        "TensorScatter",
        (buffer, new, write_at),
        attrs={"axis": 2, "mode": "linear"},
        dtype=buffer.dtype,
        shape=buffer.shape,
        version=24,
    )


def scatter_copy(buffer: Tensor, new: Tensor, write_at: Tensor) -> Tensor:
    """The same, written to a copy."""
    return buffer.scatter(2, _columns(new, write_at), new)


class FixedCache(Cache):  # type: ignore[misc] # transformers comes without types
    """A transformers cache without layers of its own: new keys and values are written where `write_at` says.

    `update` returns the first `length` columns of the buffers, those the mask speaks of; `keys` and `values` hold the
    whole buffers.
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], write_at: Tensor, length: int, scatter: Scatter
    ) -> None:
        super().__init__(layers=[])
        self.keys, self.values = list(keys), list(values)
        self.write_at, self.length, self.scatter = write_at, length, scatter

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [R, H, S, D] of one layer; return what attention reads, [R, H, length, D] each."""
        self.keys[layer] = self.scatter(self.keys[layer], key, self.write_at)
        self.values[layer] = self.scatter(self.values[layer], value, self.write_at)
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]

    def __len__(self) -> int:
        return len(self.keys)


class ColumnsCache(FixedCache):
    """A cache for graphs that write nothing: attention reads a copy, and `keys` and `values` become the new columns.

    Every row's new columns must lie within the mask, padding included.
    """

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        past = self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]
        self.keys[layer], self.values[layer] = key, value
        return self.scatter(past[0], key, self.write_at), self.scatter(past[1], value, self.write_at)


class Rotation:
    """Rotary positions that are applied when keys are stored: what a model's attentions call in place of their own.

    Attributes:
        waiting: what was handed over unturned and is not stored yet.
        query: what attention is going to be given, and what it is to take for it.
    """

    def __init__(self) -> None:
        self.waiting: Turn | None = None
        self.query: tuple[Tensor, Tensor] | None = None

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.waiting is not None:
            raise InvalidInput("attention", "triton", "a fused model runs in its engine only; load it again elsewhere")
        self.waiting = Turn(query, key, cos, sin)
        return query, key

    def taken(self, key: Tensor) -> Turn | None:
        """What is to be turned when `key` is stored; None if it has been."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None and waiting.key is not key:
            raise InvalidInput("attention", "triton", "the model changes its keys after turning them; give sdpa")
        return waiting

    def turned(self, query: Tensor) -> Tensor:
        """The queries that attention takes for `query`."""
        if self.query is None:
            return query
        (given, turned), self.query = self.query, None
        if given is not query:
            raise InvalidInput("attention", "triton", "the model changes its queries after turning them; give sdpa")
        return turned


class KernelCache(FixedCache):
    """The cache of `engines.pytorch.attention`: keys and values of a layer are written by one kernel.

    Attributes:
        rotation: what that kernel is to turn on the way.
    """

    rotation: Rotation = Rotation()

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [R, H, S, D] of one layer; return its whole buffers."""
        turn = self.rotation.taken(key)
        turned = store_columns(key, value, self.keys[layer], self.values[layer], self.write_at, turn)
        if turn is not None and turned is not None:
            self.rotation.query = turn.query, turned
        return self.keys[layer], self.values[layer]


class ShapeCache(FixedCache):
    """A cache that keeps nothing but the shapes of what it is given."""

    def __init__(self) -> None:
        super().__init__([], [], torch.zeros(0), 0, scatter_in_place)
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.shapes[layer] = key.shape, value.shape
        return key, value
