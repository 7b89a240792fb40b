"""CUDA graphs: capturing work, and work that cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import ClassVar

import torch

MAX_GRAPHS = 64
"""Graphs that are kept; the least recently used one goes first."""
_CAPTURING = Lock()
"""How torch takes waits, and the memory that a capture gives back, are the process's: one thread captures at a time."""
Work = Callable[[], None]
"""Launches kernels on torch's current stream: the same ones, on the same addresses, at every call.

A graph has addresses, not tensors. What the work reads must live as long as the graph, which keeps the work and so what
that refers to; the rest is weights, and memory that its owner keeps.
"""


class Uncapturable(Exception):
    """Work ran, but could not be captured, and says why. Some of it may have run a second time."""


class Recorder:
    """What capturing needs of a device; this one captures nothing: work is launched anew each time.

    Attributes:
        captures: whether it captures.
    """

    captures: ClassVar[bool] = False

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def ordered(self) -> AbstractContextManager[None]:
        """Work inside runs behind what the caller's stream was given before, ahead of what it is given after."""
        on_gpu = self._device.type == "cuda"  # TensorRT runs on the thread's current one, at first the first
        return torch.cuda.device(self._device) if on_gpu else nullcontext()

    def record(self, work: Work) -> Work:
        """What launches some work, which is run and then captured if this captures. Only inside `ordered`.

        Raises:
            Uncapturable: it ran, but cannot be captured. What it raises when it just runs is passed on.
        """
        return work

    def wait(self) -> None:
        """Wait for all that has been launched. Only inside `ordered`.

        By an event, as another thread may be inside `waits_are_errors`: torch checks waits for a stream
        (c10/cuda/CUDAFunctions.h, `stream_synchronize`), but not waits for an event (ATen/cuda/CUDAEvent.h).
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).record_event().synchronize()


@contextmanager
def ordered(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work inside runs on a stream, behind what the caller's was given before and ahead of what it is given after."""
    caller = torch.cuda.current_stream(stream.device)
    stream.wait_stream(caller)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        caller.wait_stream(stream)


class CudaRecorder(Recorder):
    """Captures torch's CUDA graphs on a stream of its own; graphs share one memory pool.

    The default stream cannot be captured, and TensorRT synchronises around it.
    """

    captures = True

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def ordered(self) -> AbstractContextManager[None]:
        return ordered(self._stream)

    def record(self, work: Work) -> Work:
        """Run some work twice, then capture it; returns what replays it.

        The first run does what happens only once: kernels are compiled and loaded, memory is allocated. The second one
        finds waits for the device, because a capture that breaks off leaves torch's allocator in a poor state.
        """
        work()
        graph = torch.cuda.CUDAGraph()
        try:
            with _CAPTURING:
                with waits_are_errors():
                    work()
                self._stream.synchronize()
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
        except Exception as error:
            self._pool = torch.cuda.graph_pool_handle()  # torch may take the other one to be in use for good
            # where a capture breaks off, its end fails as well, and the first error is that one's context
            cause = str(error.__context__ or error).strip() or type(error).__name__
            raise Uncapturable(cause.splitlines()[0]) from error

        def launch(_: Work = work) -> None:  # inputs of a timed step and a TensorRT context have no other owner
            graph.replay()

        return launch


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Inside, torch's operations raise instead of making the host wait for the device: in every thread of the process.

    Copies between devices that wait are among them; see torch's `set_sync_debug_mode` for what is not.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
