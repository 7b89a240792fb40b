"""What may not happen while a CUDA graph is recorded, and what a recording must keep alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.buffers import leaves

Work = Callable[[], None]
"""Launches kernels on torch's current stream: the same ones, on the same addresses, at every call."""

_ATEN = torch.ops.aten

_READS = {
    _ATEN._local_scalar_dense,
    _ATEN.item,
    _ATEN.allclose,
    _ATEN.one_hot,
    _ATEN.argwhere,
    _ATEN.nonzero_numpy,
    _ATEN.is_nonzero,
    _ATEN.equal,
    _ATEN.nonzero,
    _ATEN.masked_select,
    _ATEN.bincount,
    _ATEN._unique2,
    _ATEN.unique_consecutive,
    _ATEN.unique_dim,
}
"""Operations whose result, or its shape, the host has to know."""

_INDEXED = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_}
"""Operations that look for the True entries of an index that is a mask."""


def host_wait(operation: Any, arguments: Any, result: Any) -> str | None:
    """Why an operation makes the host wait for the device, or the device for the host; None if it does not.

    Args:
        operation: torch's operator overload.
        arguments: positional and keyword arguments, nested.
        result: what it returned, nested.
    """
    packet = operation.overloadpacket
    name = str(operation)
    given = leaves(arguments)
    found = packet is _ATEN.where and len(given) == 1
    if packet in _READS or found or (packet is _ATEN.repeat_interleave and "Tensor" in operation._overloadname):
        return f"{name} gives the host a number"
    if packet in _INDEXED and any(index.dtype in (torch.bool, torch.uint8) for index in given[1:] if index.dim()):
        return f"{name} with a mask looks for its True entries"
    if len({tensor.device.type for tensor in (*given, *leaves(result)) if tensor.dim()}) > 1:
        return f"{name} between devices"
    return None


class Watch(TorchDispatchMode):  # type: ignore[misc, no-untyped-call]
    """Looks at the operations of the work inside.

    Attributes:
        waits: of the work, what cannot be recorded; the first of each kind.
        read: tensors that it read and did not make itself: their addresses are in a recording, so whoever keeps the
            recording must keep them. Constants that are made once and kept in a bounded cache are among them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: dict[str, None] = {}
        self.read: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        wait = host_wait(operation, (args, kwargs), result)
        if wait:
            self.waits[wait] = None
        # memory that a tensor of the work left may become another one of its own; what was there before is not its own
        for tensor in leaves((args, kwargs)):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._made:
                self.read.setdefault(storage, tensor)
        for tensor in leaves(result):
            storage = tensor.untyped_storage()._cdata
            if storage not in self.read:
                self._made.add(storage)
        return result


class Uncapturable(Exception):
    """Work asked the device for something while it ran, so it cannot be recorded. It has run."""


class Watched:
    """Work that is being recorded: run once as it is, then again while the recorder records.

    Attributes:
        kept: tensors that it reads and does not make.

    Raises:
        Uncapturable: the first run made the host wait, which may not happen while recording.
    """

    def __init__(self, work: Work) -> None:
        self._work, self._ran = work, False
        self.kept: list[Tensor] = []

    def __call__(self) -> None:
        with Watch() as watch:
            self._work()
        if not self._ran and watch.waits:
            raise Uncapturable("; ".join(watch.waits))
        self._ran, self.kept = True, list(watch.read.values())
