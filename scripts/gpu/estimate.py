"""What a block should take on a GPU, estimated from what it reads, launches and waits for: nothing of it was measured.

Bytes follow from the shapes. Launches of the PyTorch path were counted (`tests/runtime/decoder/cuda_graph/`); those
inside TensorRT's and TensorRT-LLM's plans are assumed. What a kernel costs beyond what it reads, and what part of its
bandwidth a GPU reaches, are those of an H200 (docs/results/gpu/h200-profile.json), taken for all GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

from scripts.results import Rows

WEIGHTS = {"target": 8.03e9, "auxiliary": 1.24e9}
"""Parameters of Llama-3.1-8B and Llama-3.2-1B, two bytes each; a step reads all of them."""
CACHE = {"target": 2 * 32 * 8 * 128 * 2, "auxiliary": 2 * 16 * 8 * 64 * 2}
"""Bytes of keys and values of a column."""
LAYERS = {"target": 32, "auxiliary": 16}
LEVELS, COLUMNS = 4, 512
"""Of the draft, and columns of the one row's text."""
KERNELS = {"sample": 282, "speculative": 963, "mtad": 968, "mmtad": 1078}
"""Launches of a block on the PyTorch path, which `docs/gpu.md` has as well."""
BANDWIDTH = {"H100": 3.35e12, "Jetson Orin": 0.2048e12}
"""Bytes per second, by the data sheets."""
REACHED, KERNEL, GRAPH, COPY, WAIT = 0.83, 3.7e-6, 10e-6, 8e-6, 20e-6
"""The part of the data sheet's bandwidth that matrix products reach, and seconds of a kernel beyond; and, assumed,
seconds of a graph's launch, of a small copy by the host, and of a wait."""


class Path(NamedTuple):
    """What a path does in a block of `mtad` beside reading.

    Attributes:
        kernels: inside the block's graph.
    """

    kernels: int

    @property
    def host(self) -> float:
        """Seconds of the host in a block: it launches a graph, copies twice, and waits once."""
        return GRAPH + 2 * COPY + WAIT


def plan_kernels(per_layer: int, between: int) -> int:
    """Kernels of a block: so many per layer of each step, and `between` per step for its inputs and what is drawn."""
    return per_layer * (LAYERS["target"] + LEVELS * LAYERS["auxiliary"]) + between * (1 + LEVELS)


PATHS = {
    "PyTorch": Path(KERNELS["mtad"]),
    "TensorRT-LLM plans": Path(plan_kernels(per_layer=9, between=40)),
    "TensorRT plans": Path(plan_kernels(per_layer=8, between=40)),
}
"""Each block is one graph. Assumed of plans: 9 and 8 kernels per layer, and between steps what the PyTorch path has."""


def floor(device: str) -> float:
    """Seconds in which a GPU can read what a block of one row has to."""
    read = sum(
        (2 * WEIGHTS[role] + COLUMNS * CACHE[role]) * steps for role, steps in (("target", 1), ("auxiliary", LEVELS))
    )
    return read / BANDWIDTH[device]


def estimate(path: Path, device: str) -> float:
    """Seconds of a block."""
    return floor(device) / REACHED + path.kernels * KERNEL + path.host


def table_rows() -> Rows:
    """One row per path and device."""
    rows = [("path", "GPU", "floor, ms", "estimated, ms", "times its floor", "host, ms", "kernels")]
    for device in BANDWIDTH:
        for name, path in PATHS.items():
            least, found = floor(device), estimate(path, device)
            times = f"{1e3 * least:.1f}", f"{1e3 * found:.1f}", f"{found / least:.2f}", f"{1e3 * path.host:.2f}"
            rows.append((name, device, *times, str(path.kernels)))
    return rows
