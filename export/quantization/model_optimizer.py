"""Scales and 8-bit weights of a float32 graph on text, found by NVIDIA Model Optimizer in a process of its own.

    python -m export.quantization.model_optimizer < REQUEST

Model Optimizer replaces parts of ONNX Runtime's quantiser where it is imported, keeps the whole model in memory and its
intermediate files in the temporary folder: all of that ends with the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from engines.base import INPUTS, EngineSpec, Step, named
from export.onnx.folding import constant
from mtad.errors import InvalidInput

MODES = {"int8-static": "int8", "fp8": "fp8"}
"""Model Optimizer's name of a precision."""
PACKAGES = ("modelopt", "onnx_graphsurgeon", "onnxconverter_common", "onnxslim", "lief", "cppimport")
"""Modules that its ONNX part imports; its extra `onnx`, which pins another ONNX Runtime, is not needed."""
TOKENS, LONGEST = 4096, 512
"""Tokens of text that ranges are found on, at most, and of each text: one forward pass each."""


@dataclass(frozen=True)
class Quantized:
    """One product as Model Optimizer quantises it.

    Attributes:
        activations: step of the activations, float32: one for the whole tensor.
        weight: reads the weight [K, N], int8 or float8_e4m3fn.
        steps: reads the weight's steps [N], float32.
    """

    activations: float
    weight: Callable[[], np.ndarray]
    steps: Callable[[], np.ndarray]


def check_installed(field: str, precision: str) -> None:
    """Whether Model Optimizer can be imported; nothing is imported.

    Raises:
        InvalidInput: it, or a package that it needs, is not installed.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"NVIDIA Model Optimizer calibrates it, and {missing[0]} is not installed"
        raise InvalidInput(field, precision, f"{problem}; pip install 'mtad[modelopt]' installs it")


def optimizer_version() -> str:
    """Version of the installed Model Optimizer."""
    return version("nvidia-modelopt")


def calibrate(
    source: Path, folder: Path, spec: EngineSpec, names: Sequence[str], texts: Sequence[Sequence[int]]
) -> dict[str, Quantized]:
    """Quantise products of a graph by the largest magnitudes that their inputs have on text.

    Args:
        source: a float32 graph of `export.onnx.graph`.
        folder: for the files of Model Optimizer, which what is returned reads from.
        names: of the MatMul nodes, whose second inputs are initializers.
        texts: token ids; the first `TOKENS` of them, `LONGEST` of each.

    Returns:
        each product by its node's name.

    Raises:
        InvalidInput: Model Optimizer refuses the graph, with its last words.
    """
    output = folder / "optimized.onnx"
    request = {
        "source": str(source),
        "output": str(output),
        "mode": MODES[spec.precision],
        "nodes": list(names),
        "texts": list(_cut(texts, min(LONGEST, spec.capacity))),
        "capacity": spec.capacity,
        "cache": [spec.layers, 2, 1, spec.kv_heads, spec.capacity, spec.head_dim],
    }
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(request), text=True, capture_output=True, env=environment)
    if done.returncode or not output.is_file():
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        problem = f"NVIDIA Model Optimizer {optimizer_version()} failed: {said[-1] if said else done.returncode}"
        raise InvalidInput("precision", spec.precision, problem)
    found = _read(output)
    missing = [name for name in names if name not in found]
    if missing:
        problem = f"NVIDIA Model Optimizer {optimizer_version()} left {len(missing)} products as they were"
        raise InvalidInput("precision", spec.precision, f"{problem}, such as {missing[0]}; choose another precision")
    return found


def _cut(texts: Sequence[Sequence[int]], longest: int) -> Iterator[list[int]]:
    left = TOKENS
    for text in texts:
        part = list(text[: min(longest, left)])
        if len(part) > 1:
            yield part
            left -= len(part)


def _read(path: Path) -> dict[str, Quantized]:
    """The products of a graph with Q/DQ pairs on activations and DQ on weights."""
    found = {}
    for node in ir.load(path).graph:
        makers = [value.producer() for value in node.inputs if value is not None]
        pair = [maker for maker in makers if maker is not None and maker.op_type == "DequantizeLinear"]
        if node.op_type == "MatMul" and len(pair) == 2:
            _, step, matrix, steps = (partial(constant, value) for maker in pair for value in maker.inputs[:2] if value)
            found[str(node.name)] = Quantized(float(step().reshape(())), matrix, steps)
    return found


def main() -> None:
    """What the process does: read a request from standard input, write the quantised graph that it names."""
    request = json.loads(sys.stdin.read())
    from modelopt.onnx.quantization import quantize
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    cache = named("past", torch.zeros(request["cache"]))

    def feed(text: list[int]) -> dict[str, np.ndarray]:
        """A prompt in one step, from an empty cache."""
        step = Step.causal(torch.tensor([text]), 0, request["capacity"], torch.arange(len(text)))
        given = {name: getattr(step, name) for name in INPUTS} | cache
        return {name: tensor.numpy() for name, tensor in given.items()}

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rewind()

        def get_next(self) -> Any:
            return next(self._feeds, None)

        def get_first(self) -> Any:
            return feed(request["texts"][0])

        def rewind(self) -> None:
            self._feeds = map(feed, request["texts"])

    quantize(
        request["source"],
        quantize_mode=request["mode"],
        calibration_data_reader=Reader(),
        calibration_method="max",
        calibration_eps=["cpu"],
        op_types_to_quantize=["MatMul"],
        nodes_to_quantize=[f"{re.escape(name)}$" for name in request["nodes"]],
        disable_mha_qdq=True,
        enable_gemv_detection_for_trt=False,
        high_precision_dtype="fp32",
        dq_only=True,
        use_external_data_format=True,
        output_path=request["output"],
        log_level="ERROR",
    )


if __name__ == "__main__":
    main()
