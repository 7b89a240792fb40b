"""Where an engine runs, and how."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engines.base import EngineSpec
from engines.kinds import KINDS, Kind, kind_of
from mtad import __version__
from mtad.errors import InvalidInput


@dataclass(frozen=True)
class Placement:
    """Where an engine runs, and how; checked before anything is loaded.

    Attributes:
        device: `cpu`, `cuda`, `cuda:1`, ..; a GPU without a number is the current one, and has its number afterwards. A
            plan of TensorRT runs on a GPU whatever is given.
        threads: of the CPU, >= 1.
        provider: of ONNX graphs, as in `engines.kinds.KINDS`: `openvino` (docs/openvino.md), or ONNX Runtime's
            (docs/onnxruntime.md); default: ONNX Runtime's of the device.
        compute: of provider openvino, one of `engines.openvino.engine.COMPUTE`; default: bfloat16 where the CPU has it.
        kv_cache: of provider openvino, `u8` or as `compute`, which is the default.
        attention: of torch engines, one of `engines.pytorch.attention.ATTENTION` (docs/gpu.md); default: by device.

    Raises:
        InvalidInput: not the name of a CPU or of a CUDA GPU, or there is no such GPU.
    """

    device: str = "cpu"
    threads: int = 1
    provider: str | None = None
    attention: str | None = None
    compute: str | None = None
    kv_cache: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", _resolve_device(self.device))

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def check(self, spec: EngineSpec) -> Kind:
        """The kind of engine that runs there.

        Raises:
            InvalidInput: there is none, or what is asked for is not what it has.
        """
        kind = kind_of(spec.format, self.provider, self.device)
        for other in KINDS:
            for name in other.options:
                value = getattr(self, name)
                if value is not None and name not in kind.options:
                    owner = f"provider {other.provider}" if other.provider else f"format {other.format}"
                    raise InvalidInput(name, value, f"it is an option of {owner}; leave it out")
        if spec.dtype not in kind.dtypes:
            remedy = "export --to torch or in another precision, or open it with --device cuda"
            problem = f"provider {kind.provider} computes in {' or '.join(kind.dtypes)} only; {remedy}"
            raise InvalidInput("precision", spec.precision, problem)
        return kind


def _resolve_device(device: str) -> str:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise InvalidInput("device", device, "give cpu, cuda, or cuda:1")
    if found.type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "finds no GPU (nvidia-smi shows them)"
        raise InvalidInput("device", device, f"torch {torch.__version__} {why}; give cpu, or install what is missing")
    count = torch.cuda.device_count()
    if found.index is not None and found.index >= count:
        raise InvalidInput("device", device, f"there are {count} GPUs, cuda:0 to cuda:{count - 1}")
    return f"cuda:{torch.cuda.current_device() if found.index is None else found.index}"


ONE_CORE = Placement()
"""One thread of the CPU."""


def cores() -> int:
    """Cores of the CPU that this process may use; a container's limit of time counts as well."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # Linux's cgroups, version 2; without a limit, the first word is `max`
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count


def versions(*packages: str) -> dict[str, str]:
    """Versions of those of the packages that are installed; `mtad` has one wherever its source is."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = __version__ if name == "mtad" else version(name)
    return found
