"""What an export will take and give, before anything is written: disk, memory, time.

Sizes follow from the model's shape. Time and the exporter's memory are estimates, fitted to exports that were measured;
what they were measured on is written beside each figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engines.base import DTYPES, EngineSpec
from engines.memory import Memory, format_bytes
from export.checkpoint.checkpoint import Checkpoint
from export.options import STATIC
from export.pair import engine_differs
from export.plan import PairPlan

NODES = 8 * 8
"""Largest tree that `LLM` takes without being told to, which the memory is for."""
GRAPH, GRAPH_LAYER = 4 * 2**10, 12 * 2**10
"""Bytes of model.onnx, weights aside: of any model, and of a layer."""
IMPORTS = 590 * 2**20
"""Bytes of an exporting process that holds no weights."""
COPIES = {"onnx": 1.05, "torch": 1.3, "int8-dynamic": 3.2}
"""Memory at the peak as a multiple of the float32 weights, by format, while the engine is verified, or by precision,
while ONNX Runtime's `quantize_dynamic` runs: that held 5.41 GB of a Llama shape of 383 million parameters, 1.53 GB.
Checkpoints that transformers converts while it loads them take one more; other quantised engines were not measured."""
BITS = {"int8": 8 + 0.16, "int4": 4 + 1, "int8-dynamic": 8, "int8-static": 8, "fp8": 8}
"""Of a quantised weight, its part of the scales included; embeddings keep the dtype of the cache."""
TRACE, TRACE_LAYER = 2.0, 1.2
"""CPU seconds it takes to make the graph: of any model, and of a layer."""
PER_BILLION = {"onnx": 75.0, "torch": 65.0}
"""CPU seconds per 10^9 parameters, by format: reading, writing, and running the checks.

Times are fitted to Llama-shaped models of 17, 29, 109 and 210 million parameters with 4 to 16 layers, float32, on one
shared x86-64 core: 8.2, 12.6, 18.3 and 37.2 s to ONNX; the third one to torch 7.1 s and 1098 MiB. Memory to ONNX is
that of 1.64 billion parameters, 6.56 GB: 7.32 GB (`python -m scripts.export_memory`). Larger ones are extrapolated.
"""


@dataclass(frozen=True)
class EngineEstimate:
    """What one engine takes.

    Attributes:
        parameters: of the model; tied ones count once.
        unchanged: an engine in the folder is the same, and is taken over.
        download: bytes of weights that are still on the hub.
        disk: bytes of the engine's folder.
        exporting, seconds: bytes of memory at the export's peak, and CPU seconds; 0 of an engine that is unchanged.
    """

    name: str
    spec: EngineSpec
    parameters: int
    unchanged: bool
    download: int
    disk: int
    exporting: int
    seconds: float


def estimate_pair(folder: Path, plan: PairPlan) -> tuple[list[EngineEstimate], Memory]:
    """EngineEstimate the export of a plan to `folder`; nothing is read but configurations.

    Returns:
        what the target and the auxiliary take, and the memory of the runtime with both, as `LLM` will print it.
    """
    engines = [_estimate(folder / model.name, model, spec) for model, spec, _ in plan.engines]
    target, auxiliary = (one.spec for one in engines)
    disk = sum(one.disk for one in engines)
    return engines, Memory.of(target, auxiliary, disk, NODES + 1, 2 * target.capacity)


def _estimate(folder: Path, model: Checkpoint, spec: EngineSpec) -> EngineEstimate:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in empty.parameters())  # tied ones count once
    wide = DTYPES[spec.dtype].itemsize
    each = BITS[spec.precision] / 8 if spec.precision in BITS else wide
    is_torch = spec.format == "torch"
    head, embeddings = empty.get_output_embeddings(), empty.get_input_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    stored = parameters + (embeddings.weight.numel() if tied and not is_torch else 0)  # a graph has the head transposed
    form = "torch" if is_torch else "onnx"  # a plan's build comes on top: not measured
    made = model.download > 0 or bool(engine_differs(folder, spec))
    seconds = (0 if is_torch else TRACE + TRACE_LAYER * spec.layers) + PER_BILLION[form] * parameters / 1e9
    return EngineEstimate(
        name=model.name,
        spec=spec,
        parameters=parameters,
        unchanged=not made,
        download=model.download,
        disk=int(stored * each + embeddings.weight.numel() * (wide - each))
        + (0 if is_torch else GRAPH + spec.layers * GRAPH_LAYER),
        exporting=(IMPORTS + int(COPIES.get(spec.precision, COPIES[form]) * parameters * 4)) * made,
        seconds=seconds * made,
    )


def describe(engines: list[EngineEstimate], running: Memory) -> str:
    """An estimate for people: a table of the engines, totals, and what comes on top of the figures."""
    table: list[tuple[str, ...]] = [("", "parameters", "on disk", "download", "KV per row", "memory", "CPU time")]
    for one in engines:
        sizes = (
            format_bytes(size) if size else "-" for size in (one.disk, one.download, one.spec.kv_bytes // one.spec.rows)
        )
        last = ("unchanged", "-") if one.unchanged else (format_bytes(one.exporting), _duration(one.seconds))
        table.append((f"{one.name} ({one.spec.architecture})", f"{one.parameters:,}", *sizes, *last))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    lines += ["", f"disk: {format_bytes(sum(one.disk for one in engines))}"]
    memory = max(one.exporting for one in engines)  # they are made one after the other
    cost = f"{format_bytes(memory)} of memory, {_duration(sum(one.seconds for one in engines))} of CPU time"
    lines.append(f"export: {cost}; estimated from parameters and layers, half or twice as much is possible")
    made = [one.spec for one in engines if not one.unchanged]
    if any(spec.plan for spec in made):
        lines.append("plans: on disk are the weights, kernels come on top; the time lacks the build; both are unknown")
    if any(spec.precision in STATIC for spec in made):
        lines.append("calibration: the memory and time of NVIDIA Model Optimizer come on top, and are unknown")
    return "\n".join([*lines, f"run: {str(running).removeprefix('memory: ')}", "nothing was written"])


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
