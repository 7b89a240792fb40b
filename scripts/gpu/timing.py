"""Time on a device: CUDA events on a GPU, the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Spread(NamedTuple):
    """Times of one thing, in milliseconds.

    Attributes:
        median: of them.
        low, high: first and third quartile.
        times: how often it was timed.
    """

    median: float
    low: float
    high: float
    times: int

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """That of times in seconds."""
        taken = [1e3 * value for value in seconds]
        if len(taken) < 2:
            return cls(taken[0], taken[0], taken[0], 1)
        low, median, high = statistics.quantiles(taken, n=4, method="inclusive")
        return cls(median, low, high, len(taken))


class Mark(ABC):
    """A moment on the device's stream."""

    @abstractmethod
    def record(self) -> None:
        """It is now, behind all that has been launched."""

    @abstractmethod
    def until(self, later: Any) -> float:
        """Seconds until a later mark; both are over."""


class Timer(ABC):
    """How time is taken on a device. `Timer.of` gives the right one."""

    @staticmethod
    def of(device: str) -> Timer:
        """A GPU's reads CUDA events; a CPU's, where work ends before its call returns, the clock."""
        return CudaTimer(device) if torch.device(device).type == "cuda" else HostTimer()

    @abstractmethod
    def mark(self) -> Mark:
        """A mark that can be recorded again and again, in a CUDA graph as well."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the device has done all it was given."""

    def measure(self, work: Callable[[], Any], repeats: int, warm_up: int = 3, seconds: float = 2.0) -> Spread:
        """Times of `work` on the current stream, one after another; fewer repeats where they take longer than that."""
        for _ in range(warm_up):
            work()
        self.wait()
        marks: list[tuple[Mark, Mark]] = []
        begun = time.perf_counter()
        while len(marks) < repeats and (len(marks) < 3 or time.perf_counter() - begun < seconds):
            pair = self.mark(), self.mark()
            pair[0].record()
            work()
            pair[1].record()
            marks.append(pair)
            if len(marks) % 8 == 0:  # the host does not run far ahead of what it measures
                self.wait()
        self.wait()
        return Spread.of([begin.until(end) for begin, end in marks])

    def whole(self, work: Callable[[], Any]) -> float:
        """Seconds until `work` is done, the host's part included."""
        self.wait()
        begun = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begun


class HostMark(Mark):
    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def until(self, later: HostMark) -> float:
        return later._at - self._at


class HostTimer(Timer):
    """The host's clock."""

    def mark(self) -> HostMark:
        return HostMark()

    def wait(self) -> None:
        """Nothing runs behind the host's back."""


class CudaMark(Mark):
    """An event; `external` makes a graph that holds it record it anew at every launch, and changes nothing elsewhere.

    Not executed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def until(self, later: CudaMark) -> float:
        return float(self._event.elapsed_time(later._event)) / 1e3


class CudaTimer(Timer):
    """CUDA events. Not executed: needs a GPU."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def mark(self) -> CudaMark:
        return CudaMark(self._device)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)
