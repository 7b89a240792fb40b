"""Memory of a server: what was freed goes back to the system, and what is no longer referred to is soon freed."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import pytest

from runtime.server import uvicorn_server
from tests.support.waiting import until


class Circular:
    def __init__(self) -> None:
        self.own = self


def resident() -> int:
    """MiB of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_memory_that_was_freed_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "TRIM_SECONDS", 0.05)
    uvicorn_server.settle_memory()
    held = [bytearray(20_000) for _ in range(20_000)]  # each is smaller than what malloc maps by itself
    most = resident()
    del held[::2], held[::3]
    until(lambda: resident() < most - 150)


def test_a_circle_is_collected_however_much_was_there_before() -> None:
    before = [[number] for number in range(600_000)]
    uvicorn_server.settle_memory()
    circle = weakref.ref(Circular())
    others = [[number] for number in range(100_000)]
    assert circle() is None
    assert len(before) > len(others)
