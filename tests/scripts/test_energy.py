"""Energy: the meter of the evaluation and the check of a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from scripts.energy import EnergyMeter


class Packages:
    """What zeus returns on a machine with one processor whose memory is counted."""

    def __init__(self) -> None:
        self.cpu, self.dram = 100.0, 10.0

    def __len__(self) -> int:
        return 1

    def get_total_energy_consumption(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(cpu_mj=self.cpu, dram_mj=self.dram)

    def supports_get_dram_energy_consumption(self, index: int) -> bool:
        return True


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Millijoules of NVML's first GPU; the second has no counter. No zeus."""
    read = {"first": 5000}

    def energy(handle: str) -> int:
        if handle not in read:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return read[handle]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: ("first", "second")[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", energy)
    monkeypatch.setitem(sys.modules, "zeus.device", None)
    return read


def install_zeus(monkeypatch: pytest.MonkeyPatch, packages: Packages) -> None:
    modules = {name: ModuleType(name) for name in ("zeus", "zeus.device", "zeus.device.exception")}
    vars(modules["zeus.device"])["get_cpus"] = lambda: packages
    vars(modules["zeus.device.exception"])["ZeusBaseCPUError"] = RuntimeError
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_gpus_without_a_counter_are_left_out(gpus: dict[str, int]) -> None:
    meter = EnergyMeter()
    meter.begin()
    gpus["first"] += 2500
    assert meter.end() == 2.5
    assert meter.name == "GPU 0 (NVML)"


def test_all_counters_of_a_window_are_added_up(gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    packages = Packages()
    install_zeus(monkeypatch, packages)
    meter = EnergyMeter()
    assert meter.name == "GPU 0 (NVML), CPU package 0 (RAPL), memory of package 0 (RAPL)"
    for _ in range(2):
        meter.begin()
        gpus["first"] += 1000
        packages.cpu, packages.dram = packages.cpu + 500, packages.dram + 250
        assert meter.end() == 1.75


def test_a_machine_without_a_driver_reports_no_energy_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    monkeypatch.setitem(sys.modules, "zeus.device", None)
    meter = EnergyMeter()
    assert not meter.available
    assert meter.name == "none (NVML: NVML Shared Library Not Found; zeus is not installed)"
