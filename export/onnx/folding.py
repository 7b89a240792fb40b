"""Weights of a graph that was traced without any: what is done to them once, and writing them one at a time.

And edits of a graph in memory: initializers that are read when they are written, nodes in place of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from torch._subclasses.fake_tensor import FakeTensor

from export.checkpoint.weights import Weights

FOLDED = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Add", "Mul", "Cast"}
"""Operators on weights alone that are computed when the weights are written, and not in every step."""
TRANSPOSED = ".transposed"
"""Ends the name of an initializer that is a parameter with its two axes exchanged; a parameter as it is has its own."""
INLINE = 1024
"""Bytes up to which an initializer stays in the graph's own file: shape arithmetic, not weights."""

Read = Callable[[], np.ndarray]


def set_aside(model: ir.Model) -> dict[str, torch.dtype]:
    """Take the values of parameters, which are fake, out of a graph; returns their dtypes by name."""
    found = {}
    for name, value in model.graph.initializers.items():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, FakeTensor):
            found[name] = raw.dtype
            value.const_value = None
    return found


def fill(model: ir.Model, parameters: dict[str, torch.dtype], weights: Weights, prefix: str = "") -> None:
    """Give the parameters their values back, which are read, converted and folded when they are written.

    Args:
        model: a graph after `set_aside`; changed in place.
        prefix: what stands before their names in the graph; it is taken away.
    """
    graph, reads = model.graph, dict[ir.Value, Read]()
    for name, dtype in parameters.items():
        if (value := graph.initializers.get(name)) is not None:
            reads[value] = _reader(weights, name.removeprefix(prefix), dtype)
            value.name = name.removeprefix(prefix)
    for node in list(graph):
        inputs = inputs_of(node)
        constant = all(value in reads or value.const_value is not None for value in inputs)
        if not (node.op_type in FOLDED and constant and any(value in reads for value in inputs)):
            continue
        (output,) = node.outputs
        matrix = node.op_type == "Transpose" and output.shape is not None and len(output.shape) == 2
        name = f"{inputs[0].name}{TRANSPOSED if matrix else '.folded'}"
        folded = graph.initializers.get(name)
        if folded is None:
            folded = ir.Value(name=name, shape=output.shape, type=output.type)
            graph.initializers[name] = folded
            reads[folded] = _folded(node, reads)
        output.replace_all_uses_with(folded)
        graph.remove(node, safe=True)
    for value, read in reads.items():
        if value.uses():
            value.const_value = lazy(value.name, value.dtype, value.shape, read)
        else:
            del graph.initializers[str(value.name)]


def save(model: ir.Model, path: Path) -> None:
    """Write a graph and its weights, one at a time, to `<path>.data`: a graph's own file ends at 2 GB."""
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=INLINE)


def _reader(weights: Weights, name: str, dtype: torch.dtype) -> Read:
    return lambda: ir.tensor(weights(name).to(dtype).contiguous()).numpy()


def _folded(node: ir.Node, reads: dict[ir.Value, Read]) -> Read:
    sources = {f"input_{n}": reads.get(value, partial(constant, value)) for n, value in enumerate(inputs_of(node))}
    attributes: dict[str, Any] = {name: attribute.value for name, attribute in node.attributes.items()}
    proto = onnx.helper.make_node(node.op_type, list(sources), ["output"], **attributes)

    def compute() -> np.ndarray:
        (out,) = ReferenceEvaluator(proto).run(None, {name: source() for name, source in sources.items()})
        return np.ascontiguousarray(out)

    return compute


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """The inputs that a node has, without those that it leaves out."""
    return [value for value in node.inputs if value is not None]


def constant(value: ir.Value) -> np.ndarray:
    """What an initializer holds."""
    assert value.const_value is not None
    return value.const_value.numpy()


def lazy(name: str | None, dtype: ir.DataType | None, shape: ir.ShapeProtocol | None, read: Read) -> ir.LazyTensor:
    """A tensor that `read` gives, of that type and shape already, when it is written."""
    assert dtype is not None
    assert isinstance(shape, ir.Shape)
    return ir.LazyTensor(lambda: ir.Tensor(read(), dtype=dtype), dtype=dtype, shape=shape, name=name)


def initializer(graph: ir.Graph, name: str, dtype: ir.DataType | None, shape: Sequence[int], read: Read) -> ir.Value:
    """An initializer that `read` gives, in any type, when it is written; the graph's own if it has one of that name."""
    if name not in graph.initializers:
        assert dtype is not None
        own, kind = ir.Shape(shape), dtype.numpy()
        value = ir.Value(name=name, shape=own, type=ir.TensorType(dtype))
        value.const_value = lazy(name, dtype, own, lambda: read().astype(kind, copy=False))
        graph.initializers[name] = value
    return graph.initializers[name]


def substitute(graph: ir.Graph, node: ir.Node, nodes: Sequence[ir.Node]) -> None:
    """Put `nodes` in the place of `node`: they are of the same module, the last one's output is used as its output."""
    for one in nodes:
        one.metadata_props.update(node.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, nodes[-1].outputs)
