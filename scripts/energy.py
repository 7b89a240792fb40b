"""Energy by counters the machine has: of its GPUs (NVML), of its processors and their memory (RAPL)."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import partial

log = logging.getLogger(__name__)


class NoCounters(Exception):
    """Why there are no energy counters of one kind."""


Counters = dict[str, Callable[[], float]]


class EnergyMeter:
    """All energy counters of the machine: whatever runs on it counts, this process or not.

    Counters advance every few (RAPL) to a hundred (NVML) milliseconds, so a single short answer may read as 0; sums
    over many answers are right. GPUs are read through nvidia-ml-py, processors through zeus. `name`
    says what is measured, or `none` and why; `available`, whether `end` gives figures.
    """

    def __init__(self) -> None:
        self._window: list[float] = []
        self._counters: Counters = {}
        why = []
        for source in (_gpus, _processors):
            try:
                self._counters |= source()
            except NoCounters as problem:
                why.append(str(problem))
        self.name, self.available = ", ".join(self._counters) or f"none ({'; '.join(why)})", bool(self._counters)

    def begin(self) -> None:
        """Start a window. What is to be measured must have ended when the window does, on the GPU as well."""
        self._window = [read() for read in self._counters.values()]

    def end(self) -> float | None:
        """Joules of all counters since `begin`; None without a meter."""
        now = [read() for read in self._counters.values()]
        return sum(b - a for a, b in zip(self._window, now, strict=True)) / 1000 if now else None


def _gpus() -> Counters:
    """Those of NVIDIA's since Volta. With a GPU: not executed."""
    try:
        import pynvml as nvml
    except ImportError:
        raise NoCounters("nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise NoCounters(f"NVML: {error}") from None
    found: Counters = {}
    for index, handle in enumerate(handles):
        read = partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        try:
            read()
        except nvml.NVMLError as error:
            log.info("GPU %d has no energy counter: %s", index, error)
        else:
            found[f"GPU {index} (NVML)"] = read
    return found


def _processors() -> Counters:
    try:
        zeus, problems = (importlib.import_module(f"zeus.device{part}") for part in ("", ".exception"))
    except ImportError:
        raise NoCounters("zeus is not installed") from None
    try:
        packages = zeus.get_cpus()
    except problems.ZeusBaseCPUError as error:
        raise NoCounters(f"RAPL: {error}") from None

    def read(index: int, part: str) -> float:
        return float(getattr(packages.get_total_energy_consumption(index), part))

    found: Counters = {}
    for index in range(len(packages)):
        found[f"CPU package {index} (RAPL)"] = partial(read, index, "cpu_mj")
        if packages.supports_get_dram_energy_consumption(index):
            found[f"memory of package {index} (RAPL)"] = partial(read, index, "dram_mj")
    return found
