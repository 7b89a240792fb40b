"""Energy: the meter of the evaluation and the check of a GPU."""

from __future__ import annotations

import pynvml
import pytest

from scripts.energy import EnergyMeter


def test_gpus_with_a_counter_are_added_up_and_those_without_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    read = {"first": 5000, "third": 100}  # millijoules

    def energy(handle: str) -> int:
        if handle not in read:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return read[handle]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: ("first", "second", "third")[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", energy)
    meter = EnergyMeter()
    assert meter.name == "GPU 0 (NVML), GPU 2 (NVML)"
    for _ in range(2):
        meter.begin()
        read |= {"first": read["first"] + 1000, "third": read["third"] + 750}
        assert meter.end() == 1.75


def test_a_machine_without_a_driver_reports_no_energy_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    meter = EnergyMeter()
    assert not meter.available
    assert meter.name == "none (NVML: NVML Shared Library Not Found)"
    meter.begin()
    assert meter.end() is None
