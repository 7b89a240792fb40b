"""What the soak's clients saw, and its figures."""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np


@dataclass
class Seen:
    """What the clients saw. Keeps numbers, and the texts of the sample only, so that it does not grow with requests.

    Attributes:
        ends: choices by finish reason; `left` are those whose client left the loop over their pieces.
        problems: what went against the rules, one line each.
        turned_away: submissions refused because the queue was full.
        firsts, wholes, paces: seconds of the requests that were not cancelled: submission to first piece, to the end,
            and a token after the first piece.
        memory: (requests ended, resident MiB, allocated blocks of the interpreter).
        untrimmed: (requests ended, resident MiB) with what the C library holds free.
        kept: of the sample, by request: token ids and text of each choice.
    """

    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    turned_away: int = 0
    firsts: array[float] = field(default_factory=lambda: array("d"))
    wholes: array[float] = field(default_factory=lambda: array("d"))
    paces: array[float] = field(default_factory=lambda: array("d"))
    memory: list[tuple[int, float, int]] = field(default_factory=list)
    untrimmed: list[tuple[int, float]] = field(default_factory=list)
    kept: dict[int, list[tuple[array[int], str]]] = field(default_factory=dict)


def resident() -> int:
    """Resident memory of this process, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trim() -> None:
    """Have the C library give free memory back to the system; what is not glibc does so by itself or cannot."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def trend(readings: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """What readings grow by in 1,000 requests after the first quarter, and its standard error.

    The error allows for neighbouring readings being alike: it is that of a line through the means of 8 consecutive
    stretches, if that is larger than the line's own.
    """
    points = np.array(readings[len(readings) // 4 :], dtype=np.float64) / (1000.0, 1.0)
    if len(points) < 4:
        return math.nan, math.nan
    (slope, level), covariance = np.polyfit(points[:, 0], points[:, 1], 1, cov="unscaled")
    rest = points[:, 1] - (slope * points[:, 0] + level)
    error = math.sqrt(covariance[0, 0] * (rest**2).sum() / (len(points) - 2))
    if len(points) >= 32:  # means of 8 stretches are nearly independent
        xs, ys = (np.array([part.mean() for part in np.array_split(points[:, i], 8)]) for i in (0, 1))
        about = ys - (slope * xs + level)
        error = max(error, math.sqrt((about**2).sum() / 6 / ((xs - xs.mean()) ** 2).sum()))
    return float(slope), float(error)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 in milliseconds."""
    known = [value for value in values if not math.isnan(value)]
    return {f"p{p}": float(np.percentile(known, p)) * 1e3 for p in (50, 90, 99)} if known else {}


def plot(seen: Seen, slope: float, error: float, path: Path) -> None:
    """Resident memory over requests, and the latencies."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot([at for at, _, _ in seen.memory], [mib for _, mib, _ in seen.memory], label="in use")
    left.plot(*zip(*seen.untrimmed, strict=True), color="0.7", label="with what the C library holds free")
    left.legend()
    left.set(xlabel="requests ended", ylabel="resident memory, MiB", ylim=(0, None))
    left.set_title(f"{slope:+.2f} +- {error:.2f} MiB per 1,000 requests after the first quarter", fontsize=10)
    right.hist(seen.wholes, bins=np.geomspace(max(min(seen.wholes), 1e-3), max(seen.wholes) * 1.01, 30))
    right.set(xlabel="end-to-end latency, queueing included, s", ylabel="requests", xscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def finish(program: str, name: str, report: dict[str, Any], folder: Path) -> NoReturn:
    """Write a report with the command that gave it, print it, and end the process.

    Args:
        program: module that was run.
        name: of the file.
        report: its `passed` decides the exit code, 0 or 1.
        folder: for the file; made if it is missing.
    """
    report = {"command": " ".join([f"python -m {program}", *sys.argv[1:]]), **report}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))
    sys.exit(0 if report["passed"] else 1)
