"""Energy of the GPUs, by the counters of their own that NVML reads, through zeus."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)


class EnergyMeter:
    """Joules since the meter was made, by GPU; of a machine without a meter, nothing.

    Whatever runs on a GPU counts, this server or not. zeus (the extra `energy`) is loaded only if it is installed, by
    the first look at the meter.
    """

    def __init__(self) -> None:
        self._gpus: Any = None
        self._begun: dict[int, int] | None = None

    def joules(self) -> Iterator[tuple[str, float]]:
        """(GPU's index, joules)."""
        if self._begun is None:
            self._begun = self._open()
        for index, begun in self._begun.items():
            yield str(index), (self._gpus.get_total_energy_consumption(index) - begun) / 1000

    def _open(self) -> dict[int, int]:
        """Millijoules on each counter now."""
        if importlib.util.find_spec("zeus") is None:
            return {}
        from zeus.device import get_gpus
        from zeus.device.exception import ZeusBaseGPUError

        try:
            self._gpus = get_gpus()
        except ZeusBaseGPUError as error:
            log.info("no energy is reported: %s", error)
            return {}
        return {
            index: self._gpus.get_total_energy_consumption(index)
            for index in range(len(self._gpus))
            if self._gpus.supports_get_total_energy_consumption(index)
        }
