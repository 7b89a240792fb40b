"""Energy by counters the machine has: of its GPUs (NVML), of its processors and their memory (RAPL)."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

log = logging.getLogger(__name__)


class NoCounters(Exception):
    """Why there are no energy counters of one kind."""


class EnergyMeter:
    """All energy counters of the machine: whatever runs on it counts, this process or not.

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
        return ", ".join(self._counters) or f"none ({'; '.join(self._why)})"

    @property
    def available(self) -> bool:
        """Whether `end` gives figures."""
        return bool(self._counters)

    def begin(self) -> None:
        """Start a window. What is to be measured must have ended when the window does, on the GPU as well."""
        self._window = [read() for read in self._counters.values()]

    def end(self) -> float | None:
        """Joules of all counters since `begin`; None without a meter."""
        now = [read() for read in self._counters.values()]
        return sum(b - a for a, b in zip(self._window, now, strict=True)) / 1000 if now else None

    @cached_property
    def _counters(self) -> Mapping[str, Callable[[], float]]:
        """What reads each counter's millijoules, by its name."""
        found: dict[str, Callable[[], float]] = {}
        for source in (_gpus, _processors):
            try:
                found.update(source())
            except NoCounters as problem:
                self._why.append(str(problem))
        return found


def _gpus() -> Iterator[tuple[str, Callable[[], float]]]:
    """Those of NVIDIA's since Volta. With a GPU: not executed."""
    try:
        import pynvml as nvml
    except ImportError:
        raise NoCounters("nvidia-ml-py is not installed (extra energy)") from None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise NoCounters(f"NVML: {error}") from None
    for index, handle in enumerate(handles):
        read = partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        try:
            read()
        except nvml.NVMLError as error:
            log.info("GPU %d has no energy counter: %s", index, error)
        else:
            yield f"GPU {index} (NVML)", read


def _processors() -> Iterator[tuple[str, Callable[[], float]]]:
    """Those with RAPL that may be read."""
    try:
        zeus = importlib.import_module("zeus.device")
        exceptions = importlib.import_module("zeus.device.exception")
    except ImportError:
        raise NoCounters("zeus is not installed (extra energy)") from None
    try:
        packages = zeus.get_cpus()
    except exceptions.ZeusBaseCPUError as error:
        raise NoCounters(f"RAPL: {error}") from None

    def read(index: int, part: str) -> float:
        consumed: Any = packages.get_total_energy_consumption(index)
        return float(getattr(consumed, part))

    for index in range(len(packages)):
        yield f"CPU package {index} (RAPL)", partial(read, index, "cpu_mj")
        if packages.supports_get_dram_energy_consumption(index):
            yield f"memory of package {index} (RAPL)", partial(read, index, "dram_mj")
