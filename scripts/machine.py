"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from engines.placement import cores, versions


def machine() -> dict[str, Any]:
    """What it ran on."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    model = next((line.split(":")[1].strip() for line in names if line.startswith("model name")), platform.processor())
    packages = ("torch", "transformers", "numpy", "onnxruntime-gpu", "onnxruntime")
    return {
        "processor": f"{model}, {platform.machine()}",
        "cores": cores(),
        "load_before": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | versions(*packages),
    }
