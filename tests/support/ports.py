"""Ports for processes that are told where to listen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now, and that the system gives nobody who asks for any."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found: list[int] = []
    for port in random.SystemRandom().sample([one for one in range(20_000, 65_536) if not low <= one <= high], 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free ports")
