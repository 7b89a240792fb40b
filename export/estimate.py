"""What an export takes and gives, before anything is written: disk and memory, from the shapes of its models."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engines.base import DTYPES, EngineSpec
from engines.kinds import FORMATS
from engines.memory import Memory, format_bytes
from export.checkpoint.checkpoint import Checkpoint
from export.options import MEASURED
from export.pair import engine_differs
from export.plan import PairPlan
from export.verification.verify import few_rows

NODES = 8 * 8
"""Largest tree that `LLM` takes without being told to, which the memory is for."""
COPIES = {"graph": 1.05, "plan": 1.05, "checkpoint": 1.3}
"""Memory at the peak as a multiple of the float32 weights, by what is stored (docs/export.md), but for the cache."""
BITS = {"int8": 8 + 0.16, "int4": 4 + 1, "int8-static": 8, "fp8": 8}
"""Of a quantised weight, its part of the scales included; all but matrices of products keeps the cache's dtype."""


@dataclass(frozen=True)
class EngineEstimate:
    """What one engine takes, in bytes.

    Attributes:
        parameters: of the model; tied ones count once.
        unchanged: an engine in the folder is the same, and is taken over.
        download: weights that are still on the hub.
        disk: the engine's weights.
        memory: what the export holds of the model at its peak.
    """

    name: str
    spec: EngineSpec
    parameters: int
    unchanged: bool
    download: int
    disk: int
    memory: int


def estimate_pair(folder: Path, plan: PairPlan) -> tuple[list[EngineEstimate], Memory]:
    """Estimate the export of a plan to `folder`; nothing is read but configurations.

    Returns:
        what each engine takes, and the memory of the runtime with all, as `LLM` will print it.
    """
    engines = [_estimate(folder / model.name, model, spec) for model, spec, _ in plan.engines]
    target, *auxiliaries = (one.spec for one in engines)
    auxiliary = auxiliaries[0] if auxiliaries else target.without_layers
    return engines, Memory.of(target, auxiliary, sum(one.disk for one in engines), NODES + 1, 2 * target.capacity)


def _estimate(folder: Path, model: Checkpoint, spec: EngineSpec) -> EngineEstimate:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    head, embeddings = empty.get_output_embeddings(), empty.get_input_embeddings().weight
    stored = FORMATS[spec.format].stored
    # a graph has a tied head a second time, transposed
    repeated = embeddings.numel() if stored != "checkpoint" and head is not None and head.weight is embeddings else 0
    wide, weights = DTYPES[spec.dtype].itemsize, parameters + repeated
    tables = {id(module.weight) for module in empty.modules() if isinstance(module, torch.nn.Embedding)}
    matrices = repeated + sum(p.numel() for p in empty.parameters() if p.dim() == 2 and id(p) not in tables)
    disk = int(matrices * BITS.get(spec.precision, 8 * wide) / 8 + (weights - matrices) * wide)
    besides = few_rows(spec).kv_bytes + disk * (spec.precision in MEASURED)  # which is measured beside the float32 one
    return EngineEstimate(
        name=model.name,
        spec=spec,
        parameters=parameters,
        unchanged=not (model.download or engine_differs(folder, spec)),
        download=model.download,
        disk=disk,
        memory=int(COPIES[stored] * weights * 4) + besides,
    )


def describe(folder: Path, engines: list[EngineEstimate], running: Memory) -> str:
    """An estimate for people: a table of the engines, the free space, totals, and what comes on top of the figures."""
    table = [("", "parameters", "on disk", "download", "KV per row", "memory")]
    for one in engines:
        sizes = (one.disk, one.download, one.spec.kv_bytes // one.spec.rows, 0 if one.unchanged else one.memory)
        disk, download, row, memory = (format_bytes(size) if size else "-" for size in sizes)
        name = f"{one.name} ({one.spec.architecture}{', unchanged' if one.unchanged else ''})"
        table.append((name, f"{one.parameters:,}", disk, download, row, memory))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    if any(one.spec.plan for one in engines):
        lines.append("on top, and unknown: a plan's kernels, what building it takes, and NVIDIA Model Optimizer")
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    free, wanted = shutil.disk_usage(there).free, sum(one.disk for one in engines if not one.unchanged)
    if any(one.spec.precision in MEASURED for one in engines):  # it is made of a float32 pair beside it
        wanted += 4 * sum(one.parameters for one in engines)
    fits = "" if wanted < free else ": it does not fit"
    lines.append(f"disk: {format_bytes(wanted)} of {format_bytes(free)} that are free{fits}")
    return "\n".join([*lines, "", f"run: {str(running).removeprefix('memory: ')}", "nothing was written"])
