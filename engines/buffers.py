"""Memory of what lasts for one block at most."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_ALIGNED = 64  # bytes: a cache line, and what vectorised kernels ask for


K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """What was used last, of at most so many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def find(self, key: K, make: Callable[[], V]) -> V:
        """What is kept under `key`; made now if nothing is."""
        if key not in self:
            self[key] = make()
            if len(self) > self.most:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]


class Slab:
    """One piece of memory that blocks of every shape use, one after another.

    A block's shape decides where in it each tensor lies; nothing outlives the block, so shapes need no memory of their
    own. It grows to what the largest block needs, by half at least. Views of it from before it grew stay what they are,
    on the smaller memory it had, all of which together is at most twice what it has now.

    Args:
        pinned: memory of the host that a GPU copies from and to without the host's help.
    """

    def __init__(self, device: torch.device | str = "cpu", pinned: bool = False) -> None:
        self._device, self._pinned = torch.device(device), pinned
        self._memory = self._new(0)

    def bytes(self, size: int) -> Tensor:
        """Its first `size` bytes, uint8 [size]; whatever is in them."""
        have = len(self._memory)
        if size > have:
            self._memory = self._new(max(size, have + have // 2))
        return self._memory[:size]

    def _new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned and size > 0)

    def like(self, tensors: Any, start: int = 0) -> Any:
        """Views from byte `start` on, shaped like `tensors`; see `views`."""
        return views(tensors, self.bytes(start + size_of(tensors)), start)


def views(tensors: Any, memory: Tensor, start: int = 0) -> Any:
    """Contiguous views of `memory`, uint8 [..], one after another, for tensors of these shapes and types.

    Args:
        tensors: nested tuples of tensors (of any device: only shape and type matter) and None; the result is alike.
        memory: at least `start + size_of(tensors)` bytes.
        start: of the first, a multiple of 64.
    """
    starts = itertools.accumulate((_aligned(tensor) for tensor in leaves(tensors)), initial=start)

    def view(tensor: Tensor) -> Tensor:
        at = next(starts)
        return memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return tree_map_only(Tensor, view, tensors)


def size_of(tensors: Any) -> int:
    """Bytes that `views` of such tensors span."""
    return sum(map(_aligned, leaves(tensors)))


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def packed(tensors: Any) -> Tensor:
    """What the tensors hold, as `views` lays them out: uint8 [size_of(tensors)]."""
    memory = torch.zeros(size_of(tensors), dtype=torch.uint8)
    for tensor, view in zip(leaves(tensors), leaves(views(tensors, memory)), strict=True):
        view.copy_(tensor)
    return memory


def sent(values: Any, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on a device, without waiting for it: a GPU copies from pinned memory."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def leaves(value: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in order; a third of the time of torch's `tree_leaves`."""
    if isinstance(value, Tensor):
        return [value]
    parts = list(value.values()) if isinstance(value, dict) else value
    return [leaf for part in parts for leaf in leaves(part)] if isinstance(parts, (tuple, list)) else []
