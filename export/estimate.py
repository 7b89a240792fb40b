"""What an export will take and give, before anything is written: disk, memory, time.

Sizes follow from the model's shape. Time and the exporter's memory are estimates, fitted to exports that were measured;
what they were measured on is written beside each figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engines.base import DTYPES, EngineSpec
from engines.memory import Memory, format_bytes
from export.checkpoint.checkpoint import Checkpoint
from export.pair import engine_differs
from export.plan import PairPlan
from export.quantization.qdq import STATIC

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
class Estimate:
    """What one engine takes.

    Attributes:
        name: target or auxiliary.
        architecture: the checkpoint's.
        parameters: of the model; tied ones count once.
        unchanged: an engine in the folder is the same, and is taken over.
        download: bytes of weights that are still on the hub.
        disk: bytes of the engine's folder.
        exporting: bytes of memory at the export's peak.
        seconds: CPU seconds of the export.
        kv_row: bytes of one row of its KV cache.
        plan: whether it becomes a plan of TensorRT, whose kernels come on top of `disk` and whose build on top of
            `seconds`: both depend on the model and its GPUs, and are unknown.
        calibrated: whether Model Optimizer quantises it, whose memory comes on top of `exporting` and is unknown.
    """

    name: str
    architecture: str
    parameters: int
    unchanged: bool
    download: int
    disk: int
    exporting: int
    seconds: float
    kv_row: int
    plan: bool = False
    calibrated: bool = False


@dataclass(frozen=True)
class PairEstimate:
    """What a pair takes.

    Attributes:
        engines: the target's and the auxiliary's.
        running: memory of the runtime with both, as `LLM` will print it.
    """

    engines: tuple[Estimate, Estimate]
    running: Memory

    @property
    def disk(self) -> int:
        """Bytes on disk; twice as many are needed while an existing pair is replaced."""
        return sum(one.disk for one in self.engines)

    @property
    def exporting(self) -> int:
        """Bytes of memory: the engines are made one after the other."""
        return max((one.exporting for one in self.engines if not one.unchanged), default=0)

    @property
    def seconds(self) -> float:
        """CPU seconds of what has to be built."""
        return sum(one.seconds for one in self.engines if not one.unchanged)


def estimate_pair(folder: Path, plan: PairPlan) -> PairEstimate:
    """Estimate the export of a plan to `folder`; nothing is read but configurations."""
    engines = [_estimate(folder / model.name, model, spec) for model, spec, _ in plan.engines]
    target, auxiliary = (spec for _, spec, _ in plan.engines)
    weights = sum(one.disk for one in engines)
    return PairEstimate((engines[0], engines[1]), Memory.of(target, auxiliary, weights, NODES + 1, 2 * target.capacity))


def _parameters(model: Checkpoint) -> tuple[int, int]:
    """Parameters of a model, tied ones once, and those of its input embeddings."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    return sum(p.numel() for p in empty.parameters()), empty.get_input_embeddings().weight.numel()


def _estimate(folder: Path, model: Checkpoint, spec: EngineSpec) -> Estimate:
    parameters, embeddings = _parameters(model)
    each = BITS[spec.precision] / 8 if spec.precision in BITS else DTYPES[spec.dtype].itemsize
    kept = embeddings * (DTYPES[spec.dtype].itemsize - each)
    form = "torch" if spec.format == "torch" else "onnx"  # a plan's build comes on top: not measured
    graph, trace = (
        (GRAPH + spec.layers * GRAPH_LAYER, TRACE + TRACE_LAYER * spec.layers) if form == "onnx" else (0, 0.0)
    )
    return Estimate(
        name=model.name,
        architecture=spec.architecture,
        parameters=parameters,
        unchanged=not model.download and not engine_differs(folder, spec),
        download=model.download,
        disk=int(parameters * each + kept) + graph,
        exporting=IMPORTS + int(COPIES.get(spec.precision, COPIES[form]) * parameters * 4),
        seconds=trace + PER_BILLION[form] * parameters / 1e9,
        kv_row=spec.kv_bytes // spec.rows,
        plan=spec.plan is not None,
        calibrated=spec.precision in STATIC,
    )


def describe(found: PairEstimate) -> str:
    """An estimate for people."""
    head = ["", "parameters", "on disk", "download", "KV per row", "memory", "CPU time"]
    table = [head]
    for one in found.engines:
        memory, time = format_bytes(one.exporting), _duration(one.seconds)
        last = ["unchanged", "-"] if one.unchanged else [memory, time]
        sizes = [format_bytes(one.disk), format_bytes(one.download) if one.download else "-", format_bytes(one.kv_row)]
        table.append([f"{one.name} ({one.architecture})", f"{one.parameters:,}", *sizes, *last])
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(
        [
            *lines,
            "",
            f"disk: {format_bytes(found.disk)}",
            f"export: {format_bytes(found.exporting)} of memory, {_duration(found.seconds)} of CPU time; estimated from"
            " parameters and layers, half or twice as much is possible",
            *_unknown([one for one in found.engines if not one.unchanged]),
            f"run: {str(found.running).removeprefix('memory: ')}",
            "nothing was written",
        ]
    )


def _unknown(engines: Sequence[Estimate]) -> list[str]:
    """What comes on top of the figures, and was not estimated."""
    lines = []
    if any(one.plan for one in engines):
        lines.append("plans: on disk are the weights, kernels come on top; the time lacks the build; both are unknown")
    if any(one.calibrated for one in engines):
        lines.append("calibration: the memory and time of NVIDIA Model Optimizer come on top, and are unknown")
    return lines


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
