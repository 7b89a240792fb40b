"""Memory that lasts for one block at most, and caches of what is used again."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_ALIGNMENT = 64  # bytes: a cache line, and what vectorised kernels ask for

K = TypeVar("K")
V = TypeVar("V")


class LruCache(OrderedDict[K, V]):
    """At most `max_size` values; the least recently used one is dropped first."""

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self.max_size = max_size

    def find(self, key: K, make: Callable[[], V]) -> V:
        """The value under `key`, made now if there is none."""
        if (found := self.get(key)) is None:
            found = self[key] = make()
            if len(self) > self.max_size:
                self.popitem(last=False)
        self.move_to_end(key)
        return found


class Arena:
    """One piece of memory that blocks of every shape use, one after another.

    A block's shape decides where in it each tensor lies; nothing outlives the block, so shapes need no memory of their
    own. It grows to what the largest block needs, by half at least. Views from before it grew keep the smaller memory
    that they were made of; all of that together is at most twice what the arena has now.

    Args:
        pinned: memory of the host that a GPU copies from and to without the host's help.
    """

    def __init__(self, device: torch.device | str = "cpu", pinned: bool = False) -> None:
        self._device, self._pinned = torch.device(device), pinned
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def bytes(self, size: int) -> Tensor:
        """The first `size` bytes, uint8 [size], uninitialised."""
        capacity = len(self._memory)
        if size > capacity:
            grown = max(size, capacity + capacity // 2)
            self._memory = torch.empty(grown, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        return self._memory[:size]

    def view_like(self, tensors: Any) -> Any:
        """Views from the start on, shaped like `tensors`; see `views`."""
        return views(tensors, self.bytes(size_of(tensors)))


def views(tensors: Any, memory: Tensor) -> Any:
    """Contiguous views of `memory`, uint8 [..], one after another, for tensors of these shapes and types.

    Args:
        tensors: nested tuples of tensors (of any device: only shape and type matter) and None; the result is alike.
        memory: at least `size_of(tensors)` bytes.
    """
    starts = itertools.accumulate((_aligned_size(tensor) for tensor in flatten_tensors(tensors)), initial=0)

    def view(tensor: Tensor) -> Tensor:
        at = next(starts)
        return memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return tree_map_only(Tensor, view, tensors)


def size_of(tensors: Any) -> int:
    """Bytes that `views` of such tensors span."""
    return sum(map(_aligned_size, flatten_tensors(tensors)))


def _aligned_size(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def to_device(values: Any, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on a device, without waiting for it: a GPU copies from pinned memory."""
    made = torch.tensor(values)
    return (made.pin_memory() if device.type == "cuda" else made).to(device, non_blocking=True)


def flatten_tensors(value: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in order; a third of the time of torch's `tree_leaves`."""
    if isinstance(value, Tensor):
        return [value]
    parts = list(value.values()) if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in flatten_tensors(part)] if isinstance(parts, (tuple, list)) else []
