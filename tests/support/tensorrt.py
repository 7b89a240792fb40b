"""An engine and a plan that tests of TensorRT start from."""

from __future__ import annotations

from engines.base import EngineSpec
from engines.tensorrt_plan import Gpu, TensorRtPlan

TARGETS = ("8.6", "8.9", "12.0")
"""Compute capabilities: Ampere, Ada Lovelace, Blackwell."""
ADA = Gpu("NVIDIA GeForce RTX 4090", "8.9")
SPEC = EngineSpec("LlamaForCausalLM", 2, 2, 16, 300, "float32", 4, 512, (0,), "onnx", "", {})
PLAN = TensorRtPlan("1.7.1.116", None, TARGETS, 4, 9, 32)
