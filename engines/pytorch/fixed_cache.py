"""The exporter's cache as transformers sees it: new keys and values go to columns of a row that the step names.

They are written by ONNX operators in an export, else to copies. The engine's own is `engines.pytorch.paged_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


def scatter_operator(buffer: Tensor, new: Tensor, write_at: Tensor) -> Tensor:
    """`buffer` [R, H, C, D] with `new` [R, H, S, D] from columns write_at[r] on, by an ONNX `TensorScatter` node."""
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
    columns = write_at[:, None] + torch.arange(new.shape[2], device=new.device)
    return buffer.scatter(2, columns[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]), new)


def padded(new: Tensor, buffer: Tensor) -> Tensor:
    """`new` [R, H, S, D] with zeros up to the heads and head dimension of `buffer`, which layers of more have."""
    heads, dim = buffer.shape[1] - new.shape[1], buffer.shape[3] - new.shape[3]
    return torch.nn.functional.pad(new, (0, dim, 0, 0, 0, heads)) if heads or dim else new


def cut(buffer: Tensor, new: Tensor) -> Tensor:
    """Of `buffer` [R, H, L, D] what a layer that stores `new` has of it."""
    return buffer if buffer.shape[1::2] == new.shape[1::2] else buffer[:, : new.shape[1], :, : new.shape[3]]


class FixedCache(Cache):  # type: ignore[misc] # transformers comes without types
    """A transformers cache without layers of its own: new keys and values are written where `write_at` says.

    `update` returns the buffers' first `length` columns, those that the mask has; `keys` and `values` hold all of them.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], write_at: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self.keys, self.values, self.write_at, self.length = list(keys), list(values), write_at, length

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [R, H, S, D] of one layer; return what attention reads, [R, H, length, D] each."""
        scatter = scatter_operator if torch.onnx.is_in_onnx_export() else scatter_copy
        self.keys[layer] = scatter(self.keys[layer], padded(key, self.keys[layer]), self.write_at)
        self.values[layer] = scatter(self.values[layer], padded(value, self.values[layer]), self.write_at)
        keys, values = self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]
        return cut(keys, key), cut(values, value)

    def __len__(self) -> int:
        return len(self.keys)


class ColumnsCache(FixedCache):
    """A cache for graphs that write nothing: attention reads a copy, and `keys` and `values` become the new columns.

    Every row's new columns must lie within the mask, padding included.
    """

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        past = self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]
        self.keys[layer], self.values[layer] = padded(key, past[0]), padded(value, past[1])
        read = scatter_copy(cut(past[0], key), key, self.write_at)
        return read, scatter_copy(cut(past[1], value), value, self.write_at)


class ShapeCache(Cache):  # type: ignore[misc]
    """A cache that keeps nothing but the shapes of what it is given."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.shapes[layer] = key.shape, value.shape
        return key, value
