"""Static 8-bit quantisation for TensorRT: Q/DQ operators around the products of a graph.

A product's activations pass a pair QuantizeLinear, DequantizeLinear whose step was found on text beforehand, and its
weight is stored in 8 bits behind a DequantizeLinear with a step for each column. TensorRT makes one 8-bit product of
them; everything else stays in the graph's own type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from export.onnx.folding import initializer, inputs_of, save
from export.quantization.model_optimizer import Quantized
from export.quantization.weight_only import matrices

TYPES = {"int8-static": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}
"""Of the quantised numbers."""
QUANTIZED = "_quantized"
"""Ends the name of a weight in 8 bits."""


def product_names(path: Path, parameters: Collection[str]) -> list[str]:
    """Names of the nodes that `write_quantized` quantises."""
    return [str(node.name) for node in matrices(ir.load(path).graph, parameters)]


def write_quantized(
    path: Path, copy: Path, precision: str, parameters: Collection[str], found: Mapping[str, Quantized]
) -> None:
    """Write a copy of a graph, of any type, with Q/DQ operators around its products; weights one at a time.

    Args:
        path: a graph of `export.onnx.graph`, of the model whose float32 graph was calibrated.
        parameters: names of the model's parameters, which alone are quantised.
        found: by the names of the products' nodes, which are the same in graphs of every type.
    """
    model, kind = ir.load(path), TYPES[precision]
    graph, activations, weights = model.graph, dict[ir.Value, ir.Value](), dict[str, ir.Value]()
    for node in matrices(graph, parameters):
        x, w = inputs_of(node)
        own = found[str(node.name)]
        if x not in activations:
            step = initializer(graph, f"{x.name}_scale", w.dtype, (), partial(np.array, own.activations))
            zero = _zero(graph, kind, ())
            quantized = ir.node("QuantizeLinear", [x, step, zero], name=f"{x.name}_quantize")
            restored = ir.node("DequantizeLinear", [quantized.outputs[0], step, zero], name=f"{x.name}_dequantize")
            quantized.outputs[0].name, restored.outputs[0].name = f"{x.name}{QUANTIZED}", f"{x.name}_dequantized"
            graph.insert_before(node, [quantized, restored])
            activations[x] = restored.outputs[0]
        if str(w.name) not in weights:
            assert isinstance(w.shape, ir.Shape)
            shape = w.shape.numpy()
            matrix = initializer(graph, f"{w.name}{QUANTIZED}", kind, shape, own.weight)
            steps = initializer(graph, f"{w.name}_scale", w.dtype, shape[1:], own.steps)
            inputs = [matrix, steps, _zero(graph, kind, shape[1:])]
            restored = ir.node("DequantizeLinear", inputs, {"axis": 1}, name=f"{w.name}_dequantize")
            restored.outputs[0].name = f"{w.name}_dequantized"
            restored.outputs[0].type, restored.outputs[0].shape = w.type, w.shape
            graph.insert_before(node, restored)
            weights[str(w.name)] = restored.outputs[0]
        node.replace_input_with(0, activations[x])
        node.replace_input_with(1, weights[str(w.name)])
        if not w.uses():
            del graph.initializers[str(w.name)]
    save(model, copy)


def _zero(graph: ir.Graph, kind: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
    """The zero point, which says the type of the quantised numbers."""
    name = f"zero_{kind.name.lower()}{''.join(f'_{size}' for size in shape)}"
    return initializer(graph, name, kind, shape, lambda: np.zeros(shape))
