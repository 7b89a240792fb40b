"""Static 8-bit quantisation of a graph for TensorRT, by NVIDIA Model Optimizer's own command.

The command puts QuantizeLinear and DequantizeLinear on the activations of products, and DequantizeLinear on their 8-bit
weights, of which TensorRT makes 8-bit products. It is a process of its own, because Model Optimizer replaces parts of
ONNX Runtime's quantiser where it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from engines.base import INPUTS, EngineSpec, Step, cache_tensors
from export.quantization.weight_only import dequantized
from mtad.errors import InvalidInput

MODES = {"int8-static": "int8", "fp8": "fp8"}
"""Model Optimizer's name of a precision."""
PACKAGES = ("modelopt", "onnx_graphsurgeon", "onnxconverter_common", "onnxslim", "lief", "cppimport")
"""Modules that its ONNX part imports; its extra `onnx`, which pins another ONNX Runtime, is not needed."""
TOKENS, LONGEST = 4096, 512
"""Tokens of text that ranges are found on, and those of one forward pass, at most."""


def optimizer_version(field: str, precision: str) -> str:
    """Version of the installed Model Optimizer; nothing is imported.

    Args:
        field: the option that asks for `precision`, for the error.

    Raises:
        InvalidInput: it, or a package that it needs, is not installed.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"NVIDIA Model Optimizer calibrates it, and {missing[0]} is not installed"
        raise InvalidInput(field, precision, f"{problem}; the extra quantized installs it")
    return version("nvidia-modelopt")


def quantize_static(
    source: Path, path: Path, spec: EngineSpec, products: Sequence[str], texts: Sequence[Sequence[int]]
) -> None:
    """Write a copy of a graph with 8-bit products, by the largest magnitudes that their inputs have on text.

    Everything else keeps its type. The weights of the copy lie beside it, in files of Model Optimizer's names.

    Args:
        source: a graph of `export.onnx.graph`, of `spec.dtype`.
        path: the file to write, in a folder that takes temporary files as well.
        products: names of the MatMul nodes to quantise, whose second inputs are initializers.
        texts: token ids; the first `TOKENS` of them are joined and cut into passes of one length, at most `LONGEST`.

    Raises:
        InvalidInput: Model Optimizer refuses the graph, with its last words, or leaves products as they are.
    """
    joined = torch.tensor([token for text in texts for token in text][:TOKENS])
    length = min(LONGEST, spec.capacity, len(joined))
    tokens = joined[: len(joined) // length * length].reshape(-1, length)
    cache = (spec.layers, 2, len(tokens), spec.kv_heads, spec.capacity, spec.head_dim)
    step = Step.causal(tokens, 0, spec.capacity, torch.arange(length).repeat(len(tokens)))
    inputs = {name: getattr(step, name) for name in INPUTS}
    inputs |= cache_tensors("past", torch.zeros(cache, dtype=spec.torch_dtype))
    data = path.with_suffix(".npz")
    np.savez_compressed(data, **{name: tensor.numpy() for name, tensor in inputs.items()})
    command = [
        *(sys.executable, "-m", "modelopt.onnx.quantization"),
        *("--onnx_path", source, "--output_path", path, "--use_external_data_format"),
        *("--quantize_mode", MODES[spec.precision], "--calibration_method", "max", "--calibration_eps", "cpu"),
        # of all inputs, `keep` alone is not one entry per row
        *("--calibration_data_path", data, "--calibration_shapes", f"keep:{length}"),
        *("--op_types_to_quantize", "MatMul", "--nodes_to_quantize", *(f"{re.escape(name)}$" for name in products)),
        # types stay: with fp16, what is float32 in a float16 graph, such as angles, would be converted as well
        *("--high_precision_dtype", "fp32", "--disable_mha_qdq", "--dq_only"),
    ]
    environment = {**os.environ, "TMPDIR": str(path.parent)}
    done = subprocess.run(list(map(str, command)), text=True, capture_output=True, env=environment)
    problem = f"NVIDIA Model Optimizer {version('nvidia-modelopt')}"
    if done.returncode or not path.is_file():
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise InvalidInput("precision", spec.precision, f"{problem} failed: {said[-1] if said else done.returncode}")
    left = len(products) - len(dequantized(path))
    if left:
        problem += f" left {left} of {len(products)} products as they were; choose another precision"
        raise InvalidInput("precision", spec.precision, problem)
