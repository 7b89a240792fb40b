"""Energy by counters the machine has: of its GPUs (NVML), of its processors and their memory (RAPL)."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class Counter(NamedTuple):
    """One counter.

    Attributes:
        kind: `gpu`, `cpu` or `dram`.
        number: of the GPU or processor package, as its driver counts them.
        read: millijoules so far, since some time in the past.
    """

    kind: str
    number: int
    read: Callable[[], float]

    def __str__(self) -> str:
        names = {"gpu": "GPU {} (NVML)", "cpu": "CPU package {} (RAPL)", "dram": "memory of package {} (RAPL)"}
        return names[self.kind].format(self.number)


class EnergyMeter:
    """All energy counters of the machine: whatever runs on a GPU counts, this process or not.

    Counters advance every few (RAPL) to a hundred (NVML) milliseconds, so a single short answer may read as 0; sums
    over many answers are right. Nothing is ever estimated. GPUs are read through nvidia-ml-py, processors through zeus
    (both are in the extra `energy`), each if it is installed; they are loaded by the first look at the meter.
    """

    def __init__(self) -> None:
        self._window: list[float] = []
        self._why: list[str] = []

    @property
    def name(self) -> str:
        """What is measured, or `none`, and why."""
        names = ", ".join(str(counter) for counter, _ in self._counters)
        return names or f"none ({'; '.join(self._why)})"

    @property
    def available(self) -> bool:
        """Whether `end` gives figures."""
        return bool(self._counters)

    def joules(self, kind: str) -> dict[str, float]:
        """Joules by index since the first look at the meter; nothing without a counter of that kind."""
        return {str(c.number): (c.read() - begun) / 1000 for c, begun in self._counters if c.kind == kind}

    def begin(self) -> None:
        """Start a window. What is to be measured must have ended when the window does, on the GPU as well."""
        self._window = [counter.read() for counter, _ in self._counters]

    def end(self) -> float | None:
        """Joules of all counters since `begin`; None without a meter."""
        now = [counter.read() for counter, _ in self._counters]
        return sum(b - a for a, b in zip(self._window, now, strict=True)) / 1000 if now else None

    @cached_property
    def _counters(self) -> list[tuple[Counter, float]]:
        """The counters, each with what it read when they were opened."""
        found: list[Counter] = []
        for source in (_gpus, _processors):
            try:
                found += list(source())
            except Missing as problem:
                self._why.append(str(problem))
        if not found:
            log.info("no energy is reported: %s", "; ".join(self._why))
        return [(counter, counter.read()) for counter in found]


class Missing(Exception):
    """Why there are no counters of one kind."""


def _gpus() -> Iterator[Counter]:
    """NVIDIA's, since Volta; `nvmlDeviceGetTotalEnergyConsumption`, millijoules. With a GPU: not executed."""
    nvml = _package("pynvml", "nvidia-ml-py")
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise Missing(f"NVML: {error}") from None
    for index, handle in enumerate(handles):
        read = partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        try:
            read()
        except nvml.NVMLError as error:
            log.info("GPU %d has no energy counter: %s", index, error)
        else:
            yield Counter("gpu", index, read)


def _processors() -> Iterator[Counter]:
    """Those with RAPL that may be read; millijoules."""
    zeus = _package("zeus.device", "zeus")
    exceptions = _package("zeus.device.exception", "zeus")
    try:
        packages = zeus.get_cpus()
    except exceptions.ZeusBaseCPUError as error:
        raise Missing(f"RAPL: {error}") from None

    def read(index: int, part: str) -> float:
        return float(getattr(packages.get_total_energy_consumption(index), part))

    for index in range(len(packages)):
        yield Counter("cpu", index, partial(read, index, "cpu_mj"))
        if packages.supports_get_dram_energy_consumption(index):
            yield Counter("dram", index, partial(read, index, "dram_mj"))


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Missing(f"{package} is not installed (extra energy)") from None
