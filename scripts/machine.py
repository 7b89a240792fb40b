"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from engines.placement import cores, versions


def machine() -> dict[str, Any]:
    """Processor, GPUs, load and versions."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    model = next((line.split(":")[1].strip() for line in names if line.startswith("model name")), platform.processor())
    packages = "torch transformers numpy numba triton onnxruntime onnxruntime-gpu openvino tensorrt tensorrt-rtx"
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": f"{model}, {platform.machine()}",
        "cores": cores(),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor}" for gpu in gpus],
        "load_before": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | versions(*packages.split()),
    }
