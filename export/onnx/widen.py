"""A graph for a GPU, in 16 bits and perhaps with 8-bit products, as one that ONNX Runtime's CPU provider can run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from export.checkpoint.weights import Weights
from export.onnx.folding import initializer, inputs_of, lazy, save

NARROW, WIDE = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16), ir.DataType.FLOAT


def write_widened(path: Path, copy: Path, activations: bool = True) -> None:
    """Write a copy of a graph in which every 16-bit number is a float32: weights, constants, casts, tensors.

    Each such number is a float32 as well, so it stays what it is. The copy computes what the graph says, with the
    graph's own weights, in float32 arithmetic; weights are widened one at a time. What is quantised to 8 bits is
    computed as the standard defines QuantizeLinear and DequantizeLinear, by plain operators: those two themselves the
    CPU provider moves about and fuses, into products of its own (int8) or operators that it does not have (float8).

    Args:
        path: a graph of `export.onnx.graph`, or a copy of it by `export.quantization.model_optimizer`.
        activations: quantise activations as well; without, their pairs of QuantizeLinear and DequantizeLinear go.
    """
    model = ir.load(path)
    graph = model.graph
    for node in list(graph):
        if node.op_type == "DequantizeLinear":
            _settle(graph, node, activations)
    graph.remove([n for n in graph if n.op_type == "QuantizeLinear" and not n.outputs[0].uses()], safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
        elif value.const_value is not None and value.const_value.dtype in NARROW:
            value.const_value = lazy(name, WIDE, value.shape, partial(_wide, value.const_value))
            value.type = ir.TensorType(WIDE)
    graphs = [graph, *graph.subgraphs()]  # of loops
    for value in (one for own in graphs for one in (*own.inputs, *(out for node in own for out in node.outputs))):
        if value.dtype in NARROW:
            value.type = ir.TensorType(WIDE)
    for node in graph.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in NARROW:
                node.attributes[name] = ir.AttrTensor(name, ir.Tensor(_wide(attribute.as_tensor()), dtype=WIDE))
            elif name in ("to", "dtype") and attribute.as_int() in NARROW:
                node.attributes[name] = ir.AttrInt64(name, int(WIDE))
    save(model, copy)


def _settle(graph: ir.Graph, node: ir.Node, activations: bool) -> None:
    (values, steps), (output,) = inputs_of(node)[:2], node.outputs
    if values.const_value is not None:
        matrix, scale = values.const_value, steps.const_value
        assert scale is not None
        shape = matrix.shape.numpy()
        made = initializer(graph, f"{output.name}_wide", WIDE, shape, lambda: _wide(matrix) * _wide(scale))
    else:
        pair = values.producer()
        assert pair is not None
        source = inputs_of(pair)[0]
        made = _quantised(graph, node, source, steps) if activations else source
    output.replace_all_uses_with(made)
    graph.remove(node, safe=True)


def _quantised(graph: ir.Graph, node: ir.Node, x: ir.Value, step: ir.Value) -> ir.Value:
    """`x` rounded to 8 bits and back, as the pair that ends in `node` does; half to even, saturating."""
    kind = inputs_of(node)[2].dtype
    assert kind is not None
    scaled = ir.node("Div", [x, step])
    if kind.is_floating_point():
        narrow = ir.node("Cast", [scaled.outputs[0]], {"to": int(kind)})
        rounded = [narrow, ir.node("Cast", [narrow.outputs[0]], {"to": int(WIDE)})]
    else:
        ends = ("least", float(kind.min)), ("largest", float(kind.max))
        limits = [initializer(graph, f"quantised_{name}", WIDE, (), partial(np.array, value)) for name, value in ends]
        whole = ir.node("Round", [scaled.outputs[0]])
        rounded = [whole, ir.node("Clip", [whole.outputs[0], *limits])]
    nodes = [scaled, *rounded, ir.node("Mul", [rounded[-1].outputs[0], step])]
    for number, one in enumerate(nodes):
        one.name = one.outputs[0].name = f"{node.outputs[0].name}_{number}"
    graph.insert_before(node, nodes)
    return nodes[-1].outputs[0]


def _wide(tensor: ir.TensorProtocol) -> np.ndarray:
    return tensor.numpy().astype(np.float32)


def rounded(weights: Weights, dtype: torch.dtype) -> Weights:
    """The weights as an engine of `dtype` has them."""
    return lambda name: weights(name).to(dtype)
