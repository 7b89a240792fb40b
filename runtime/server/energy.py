"""Energy of NVIDIA's GPUs, by their own counters (NVML)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial

log = logging.getLogger(__name__)


class NoCounters(Exception):
    """Why there are no energy counters of one kind."""


class GpuEnergy:
    """Energy of all GPUs of the machine, whichever processes use them.

    Nothing is ever estimated. The counters are looked for at the first call.
    """

    def joules(self) -> dict[str, float]:
        """Joules by the GPU's index since the first call; nothing of a GPU without a counter."""
        return {str(index): (read() - begun) / 1000 for index, (read, begun) in self._counters.items()}

    @cached_property
    def _counters(self) -> Mapping[int, tuple[Callable[[], float], float]]:
        try:
            return {index: (read, read()) for index, read in gpu_counters().items()}
        except NoCounters as problem:
            log.info("no energy is reported: %s", problem)
            return {}


def gpu_counters() -> dict[int, Callable[[], float]]:
    """The counters of NVIDIA's GPUs since Volta, by index. With a GPU: not executed.

    Returns:
        functions that read millijoules so far, since some time in the past, advancing every hundred milliseconds.

    Raises:
        NoCounters: nvidia-ml-py (in the extra `energy`) is not installed, or there is no driver.
    """
    try:
        import pynvml as nvml
    except ImportError:
        raise NoCounters("nvidia-ml-py is not installed (extra energy)") from None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise NoCounters(f"NVML: {error}") from None
    found: dict[int, Callable[[], float]] = {}
    for index, handle in enumerate(handles):
        read = partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        try:
            read()
        except nvml.NVMLError as error:
            log.info("GPU %d has no energy counter: %s", index, error)
        else:
            found[index] = read
    return found
