"""A recorder of CUDA graphs without CUDA: what is recorded is a list of operations on given memory, and nothing else.

As in a graph, a replay runs no line of the recorded Python: the same operations, on the same tensors, with the same
other arguments, in the same order; what an operation gives is written where its result lay when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engines.buffers import flatten_tensors
from engines.capture import Uncapturable, Work
from mtad.device import launches
from tests.support.fake_cuda import FakeRecorder

READS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.item,
    torch.Tensor.cpu,
    torch.Tensor.__array__,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__index__,
    torch.Tensor.__float__,
}
"""How Python looks into a tensor; on a GPU each waits for the device.

Operators that do so themselves, such as `nonzero`, are found by `tests.support.fake_gpu`.
"""

Operation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[int, Tensor]]
"""What runs, its arguments, and where those of its results go that are not parts of its arguments."""


class HostRead(AssertionError):
    """Work looked into a device's tensor."""


class NoReads(TorchFunctionMode):
    """Refuses to look into tensors, but those in the host's memory, all of `allowed`.

    Attributes:
        count: reads of allowed ones.
    """

    def __init__(self, allowed: Callable[[], tuple[Tensor, ...]] = tuple) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowed, self.count = allowed, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            memory = {tensor.untyped_storage().data_ptr() for tensor in self._allowed()}
            if args[0].untyped_storage().data_ptr() not in memory:
                raise HostRead(f"{function.__name__} of a tensor of the device")
            self.count += 1
        return function(*args, **(kwargs or {}))


class Record(TorchDispatchMode):
    """Writes down the operations of the work inside, and the kernels that it launches.

    Attributes:
        operations: in order; those that only make views, or memory nothing is in yet, are left out.
        kept: all that operations made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.kept: list[Tensor] = []
        self._launch = launches.launch

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in flatten_tensors((args, kwargs))}
        made = {
            at: tensor
            for at, tensor in enumerate(flatten_tensors(result))
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in given
        }
        if operation._schema.is_mutable or (made and "empty" not in str(operation)):
            self.operations.append((operation, args, kwargs, made))
        self.kept += made.values()
        return result

    def launch(self, kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
        """In the place of `mtad.device.launches.launch`: what a kernel's interpreter does is not recorded."""
        members = [x for own in arguments if isinstance(own, tuple) for x in own]
        assert all(x.data_ptr() % 16 == 0 for x in members), "Triton would compile the kernel for this place alone"

        def run() -> tuple[()]:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._launch(kernel, grid, arguments, **constants)
            return ()

        run()
        self.operations.append((run, (), {}, {}))


class ReplayRecorder(FakeRecorder):
    """Records and replays operations."""

    def record(self, work: Work) -> Work:
        assert self.inside, "recorded on the caller's stream"
        work()
        try:
            record = Record()
            with patch.object(launches, "launch", record.launch), NoReads(), record:
                work()
        except HostRead as problem:
            raise Uncapturable(str(problem)) from problem
        self.recorded += 1

        def replay() -> None:
            assert self.inside, "launched on the caller's stream"
            assert record.kept, "the memory that operations wrote to stays theirs"
            self.replayed += 1
            for operation, args, kwargs, made in record.operations:
                for at, tensor in enumerate(flatten_tensors(operation(*args, **kwargs))):
                    if at in made:
                        made[at].copy_(tensor)

        return replay
