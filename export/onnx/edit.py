"""Edits of a graph in memory: initializers that are read when they are written, and nodes in place of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir


def lazy(
    name: str | None, dtype: ir.DataType | None, shape: ir.ShapeProtocol | None, read: Callable[[], np.ndarray]
) -> ir.LazyTensor:
    """A tensor that `read` gives, of that type and shape already, when it is written."""
    assert dtype is not None
    assert isinstance(shape, ir.Shape)
    return ir.LazyTensor(lambda: ir.Tensor(read(), dtype=dtype), dtype=dtype, shape=shape, name=name)


def initializer(
    graph: ir.Graph, name: str, dtype: ir.DataType | None, shape: Sequence[int], read: Callable[[], np.ndarray]
) -> ir.Value:
    """An initializer that `read` gives, in any type, when it is written; the graph's own if it has one of that name."""
    if name not in graph.initializers:
        assert dtype is not None
        own, kind = ir.Shape(shape), dtype.numpy()
        value = ir.Value(name=name, shape=own, type=ir.TensorType(dtype))
        value.const_value = lazy(name, dtype, own, lambda: read().astype(kind, copy=False))
        graph.initializers[name] = value
    return graph.initializers[name]


def substitute(graph: ir.Graph, node: ir.Node, nodes: Sequence[ir.Node]) -> None:
    """Put `nodes` in the place of `node`: the last one's output takes the name, type, shape and uses of its output."""
    output, (replaced,) = nodes[-1].outputs[0], node.outputs
    output.type, output.shape = replaced.type, replaced.shape
    output.name, replaced.name = replaced.name, None
    graph.insert_before(node, nodes)
    ir.convenience.replace_all_uses_with(replaced, output, replace_graph_outputs=True)
    graph.remove(node, safe=True)
