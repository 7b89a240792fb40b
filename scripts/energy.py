"""Energy by the counters of the machine's GPUs (NVML)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

log = logging.getLogger(__name__)


class EnergyMeter:
    """All energy counters of the machine's GPUs: whatever runs on them counts, this process or not.

    NVIDIA's have them since Volta. They advance every 100 milliseconds, so a single short answer may read as 0; sums
    over many answers are right. `name` says what is measured, or `none` and why; `available`, whether `end` gives
    figures. It has run on an H200 (docs/results/gpu/h200-speed.json).
    """

    def __init__(self) -> None:
        self._window: list[float] = []
        self._counters: dict[str, Callable[[], float]] = {}
        why = self._find()
        self.name, self.available = ", ".join(self._counters) or f"none ({why})", bool(self._counters)

    def _find(self) -> str:
        """Find the counters; returns why there are none."""
        try:
            import pynvml as nvml
        except ImportError:
            return "nvidia-ml-py is not installed"
        try:
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            return f"NVML: {error}"
        for index, handle in enumerate(handles):
            read = partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
            try:
                read()
            except nvml.NVMLError as error:
                log.info("GPU %d has no energy counter: %s", index, error)
            else:
                self._counters[f"GPU {index} (NVML)"] = read
        return "no GPU has a counter"

    def begin(self) -> None:
        """Start a window. What is to be measured must have ended when the window does, on the GPU as well."""
        self._window = [read() for read in self._counters.values()]

    def end(self) -> float | None:
        """Joules of all counters since `begin`; None without a meter."""
        now = [read() for read in self._counters.values()]
        return sum(b - a for a, b in zip(self._window, now, strict=True)) / 1000 if now else None
