"""Energy by meters the machine has (NVML, RAPL), read through `zeus`; no meter, no figure."""

from __future__ import annotations

import warnings
from typing import Any

NONE = "none"
"""What is reported where nothing can be measured."""


class Meter:
    """All GPUs' and CPU packages' energy counters, memory included where it is counted.

    Counters advance every few (RAPL) to a hundred (NVML) milliseconds, so a single short answer may read as 0; sums
    over many answers are right. Nothing is ever estimated.

    Attributes:
        name: what is measured, or `none`, and why.
        available: whether anything is.
    """

    def __init__(self) -> None:
        self._monitor: Any = None
        self.name = NONE
        try:
            from zeus.monitor import ZeusMonitor
        except ImportError as error:
            self.name = f"{NONE} (no zeus: {error})"
            return
        monitor = ZeusMonitor(approx_instant_energy=False)
        parts = [f"GPU {index} (NVML)" for index in monitor.gpu_indices]
        parts += [f"CPU package {index} (RAPL)" for index in monitor.cpu_indices]
        if not parts:
            self.name = f"{NONE} (zeus finds neither NVML nor RAPL)"
            return
        self._monitor, self.name = monitor, ", ".join(parts)

    @property
    def available(self) -> bool:
        """Whether `end` gives figures."""
        return self._monitor is not None

    def begin(self) -> None:
        """Start a window; nothing without a meter."""
        if self._monitor is not None:
            self._monitor.begin_window("answer", sync_execution=False)  # answers are complete when they are returned

    def end(self) -> float | None:
        """Joules since `begin`; None without a meter."""
        if self._monitor is None:
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The energy consumption of one or more GPUs")
            window = self._monitor.end_window("answer", sync_execution=False)
        parts = (window.gpu_energy, window.cpu_energy, window.dram_energy)
        return float(sum(sum(part.values()) for part in parts if part))
