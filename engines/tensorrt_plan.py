"""What a TensorRT plan was built for, and whether this process can run it. Asked before any runtime is created."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch

from engines.kinds import FORMATS
from mtad.errors import InvalidInput, imported


@dataclass(frozen=True)
class Gpu:
    """A GPU as CUDA names it.

    Attributes:
        name: such as `NVIDIA GeForce RTX 4090`.
        compute_capability: such as `8.9`.
    """

    name: str
    compute_capability: str


@dataclass(frozen=True)
class TensorRtPlan:
    """What a plan was built with and for.

    Attributes:
        version: of TensorRT or TensorRT-RTX; a plan runs on no other.
        gpu: name of the GPU a TensorRT plan was timed on, and runs on; None for TensorRT-RTX, compiled where it runs.
        compute_capabilities: those of the GPUs it runs on, `major.minor`.
        decode_rows, decode_tokens: most rows, and most tokens per row, of the profile for drafting and scoring.
        prefill_tokens: most tokens of the profile for prompts, which runs one row.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    version: str
    gpu: str | None
    compute_capabilities: tuple[str, ...]
    decode_rows: int
    decode_tokens: int
    prefill_tokens: int


def load_runtime(format: str) -> ModuleType:
    """The module of a format's runtime: `tensorrt` or `tensorrt_rtx`. Needs no GPU.

    Raises:
        InvalidInput: it is not installed, or its libraries cannot be loaded.
    """
    jetson = "" if FORMATS[format].ahead_of_time else "; a Jetson has JetPack's"
    return imported(FORMATS[format].compiler, "format", format, f"the extra {format} installs it{jetson}")


def current_gpu() -> Gpu | None:
    """The GPU that torch would use; None if it sees none. On a GPU: not executed."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return Gpu(torch.cuda.get_device_name(), f"{major}.{minor}")


def check_plan(format: str, plan: TensorRtPlan, version: str, gpu: Gpu | None) -> None:
    """Whether a plan runs here; without this, a runtime that meets no GPU ends the process.

    Raises:
        InvalidInput: another version, no GPU, or another GPU than the plan's.
    """
    if version != plan.version:
        problem = f"the plan was built by {format} {plan.version} and runs only with that version; export again"
        raise InvalidInput(f"{format} version", version, problem)
    wanted = " or ".join(plan.compute_capabilities)
    if gpu is None:
        problem = f"the plan needs a GPU of compute capability {wanted}, but torch finds none"
        raise InvalidInput("engine format", format, f"{problem}; run it where there is one, or export --to onnx")
    found = f"{gpu.name} ({gpu.compute_capability})"
    if gpu.compute_capability not in plan.compute_capabilities:
        problem = f"the plan was built for compute capability {wanted}; export again for this GPU"
        raise InvalidInput("device", found, problem)
    if plan.gpu is not None and gpu.name != plan.gpu:
        raise InvalidInput("device", found, f"the plan was built for {plan.gpu}; export again on this GPU")
