"""A Python in which this project is not installed, nor much else but torch and transformers.

Runs a module or command in it: `python -m tests.support.bare_checkout scripts.gpu --device cpu`.
"""

from __future__ import annotations

import importlib.metadata
import runpy
import sys

MISSING = (
    *("accelerate", "grpc", "httptools", "llguidance", "matplotlib", "modelopt", "onnx", "onnx_ir", "onnxruntime"),
    *("onnxscript", "openai", "opentelemetry", "pandas", "polygraphy", "prometheus_client", "pydantic", "pynvml"),
    *("ray", "scipy", "sklearn", "starlette", "tensorrt", "tensorrt_llm", "tensorrt_rtx", "tritonclient", "uvicorn"),
)
"""Modules that cannot be imported."""


def strip() -> None:
    """Take the packages away, and this project's own entry among those installed."""
    sys.modules.update(dict.fromkeys(MISSING))  # type: ignore[arg-type] # what Python calls a module that is not there
    found = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if name.replace("-", "_").lower() in (*MISSING, "mtad"):
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    importlib.metadata.Distribution.from_name = staticmethod(from_name)  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    strip()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
