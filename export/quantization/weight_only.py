"""Quantised graphs: ONNX Runtime's own quantisers over an exported float32 graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from engines.quiet import quiet
from export.checkpoint.packed import Packed
from export.checkpoint.weights import Weights, parameter_names
from export.onnx.folding import TRANSPOSED, constant, initializer, inputs_of, save, substitute
from mtad.errors import InvalidInput

ACCURACY = 4
"""`accuracy_level` of MatMulNBits: activations are int8, by block; with 1 (float32), a step takes ten times as long."""
CONTRIBUTED = "com.microsoft"
"""The operator domain that MatMulNBits belongs to."""


WEIGHT_ONLY = {"int8": 8, "int4": 4}
"""Bits of a weight by precision. There are no zero points: with them OpenVINO has no 8-bit products on CPUs without
AVX-512, nor on others for 4 bits and an odd number of blocks (docs/cpu.md)."""


def block_size(columns: int) -> int:
    """Weights in a block: the fewest scales, but whole blocks, without which OpenVINO has the weights in float32."""
    return next((size for size in (128, 64, 32, 16) if columns % size == 0), 128)


@quiet()
def quantize_graph(
    source: Path, path: Path, precision: str, parameters: Collection[str], packed: Mapping[str, Callable[[], Packed]]
) -> None:
    """Write a quantised copy of a float32 graph of `export.onnx.graph`.

    Matrices of products are quantised, the head too; embeddings and norms stay. One float32 weight at a time is held.

    Args:
        path: the file to write, in another folder.
        precision: one of `QUANTIZED`.
        parameters: names of the model's parameters, which alone are quantised.
        packed: matrices that the checkpoint has in this precision already, by parameter. If there are any, they are
            taken over as they are, and nothing else is quantised.

    Raises:
        InvalidInput: groups of a packed matrix are no multiple of 16.
    """
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    model = ir.load(source)
    graph = model.graph
    made: dict[str, tuple[list[ir.Value], dict[str, int]]] = {}

    def quantized(node: ir.Node, weight: ir.Value) -> tuple[Iterable[ir.TensorProtocol], dict[str, int]]:
        name = str(weight.name)
        if packed:
            arrays, attributes = _as_blocks(packed[name.removesuffix(TRANSPOSED)]())
            return [ir.tensor(array, name=f"{name}{end}") for end, array in arrays.items()], attributes
        holder, array = onnx.GraphProto(), constant(weight)
        holder.initializer.append(onnx.numpy_helper.from_array(array, name))
        config = DefaultWeightOnlyQuantConfig(block_size(len(array)), True, ACCURACY, bits=WEIGHT_ONLY[precision])
        (proto,) = DefaultWeightOnlyQuantizer(config).quantize(ir.to_proto(node), [holder])
        return map(ir.from_proto, holder.initializer[1:]), {one.name: one.i for one in proto.attribute}

    for node in matrices(graph, parameters):
        data, weight = inputs_of(node)
        name = str(weight.name)
        if packed and name.removesuffix(TRANSPOSED) not in packed:
            continue
        if name not in made:
            tensors, attributes = quantized(node, weight)
            values = [initializer(graph, str(t.name), t.dtype, t.shape.numpy(), t.numpy) for t in tensors]
            made[name] = values, attributes
        values, attributes = made[name]
        new = ir.node("MatMulNBits", [data, *values], attributes, domain=CONTRIBUTED, name=node.name)
        substitute(graph, node, [new])
        if not weight.uses():
            del graph.initializers[name]
    if lost := packed.keys() - {name.removesuffix(TRANSPOSED) for name in made}:
        raise InvalidInput("precision", "int4", f"the graph has no product with {min(lost)}; give float32")
    model.opset_imports[CONTRIBUTED] = 1
    save(model, path)


def matrices(graph: ir.Graph, parameters: Collection[str]) -> list[ir.Node]:
    """The products with one of these parameters each, a matrix."""
    products = [(node, inputs_of(node)[1]) for node in graph if node.op_type == "MatMul"]
    own = [(node, w) for node, w in products if str(w.name).removesuffix(TRANSPOSED) in parameters]
    return [node for node, weight in own if weight.shape is not None and len(weight.shape) == 2]


def _as_blocks(packed: Packed) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """A packed matrix as MatMulNBits has it: its tensors by what their names end in, and its attributes."""
    (count, columns), groups = packed.numbers.shape, packed.scales.shape[1]
    block = block_size(columns // groups)
    if columns // groups % block or (packed.groups != torch.arange(columns) // (columns // groups)).any():
        problem = f"its {columns} columns are in {groups} groups, which MatMulNBits cannot have; give float32"
        raise InvalidInput("precision", "int4", problem)

    def joined(numbers: torch.Tensor) -> np.ndarray:
        """Bytes of [N, C]: of two numbers the first is the lower half."""
        values = np.pad(numbers.numpy(), ((0, 0), (0, numbers.shape[1] % 2)))
        return np.asarray(values[:, ::2] | values[:, 1::2] << 4)

    scales, zeros = (x.repeat_interleave(columns // groups // block, 1) for x in (packed.scales.float(), packed.zeros))
    numbers = joined(packed.numbers).reshape(count, columns // block, -1)
    arrays = {"_Q4": numbers, "_scales": scales.flatten().numpy(), "_zero_points": joined(zeros).flatten()}
    return arrays, {"K": columns, "N": count, "bits": 4, "block_size": block, "accuracy_level": ACCURACY}


def dequantized(path: Path) -> dict[str, Callable[[], np.ndarray]]:
    """The quantised matrices of a graph as the float32 [K, N] they stand for, by the name they had before."""
    graph, found = ir.load(path).graph, dict[str, Callable[[], np.ndarray]]()

    def arrays(names: list[str]) -> list[np.ndarray]:
        return [constant(graph.initializers[name]) for name in names]

    stored = set(graph.initializers)
    for node in graph:
        names = [str(value.name) for value in node.inputs[1:] if value is not None]
        if node.op_type == "MatMulNBits":
            rows, columns, bits, size = (int(node.attributes[key].value) for key in ("K", "N", "bits", "block_size"))
            name = names[0].removesuffix(f"_Q{bits}")
            found[name] = partial(_unpacked, partial(arrays, names), (rows, columns), bits, size)
        elif node.op_type == "DequantizeLinear" and (matrix := str(node.inputs[0] and node.inputs[0].name)) in stored:
            found[matrix] = partial(_scaled, partial(arrays, [matrix, names[0]]))
    return found


def _scaled(arrays: Callable[[], list[np.ndarray]]) -> np.ndarray:
    """[K, N] of 8-bit numbers with a scale for each column."""
    values, scale = (array.astype(np.float32) for array in arrays())
    return np.asarray(values * scale)


def _unpacked(arrays: Callable[[], list[np.ndarray]], shape: tuple[int, int], bits: int, size: int) -> np.ndarray:
    """[K, N] of a MatMulNBits weight: [N, blocks, bytes], the low half of a byte before the high one."""
    rows, columns = shape
    packed, scales, *zeros = arrays()

    def numbers(array: np.ndarray) -> np.ndarray:
        if bits == 8:
            return array
        return np.stack([array & 15, array >> 4], -1).reshape(*array.shape[:-1], -1)

    count = -(-rows // size)
    values = numbers(packed.reshape(columns, count, -1)).astype(np.float32)
    zero = numbers(zeros[0].reshape(columns, -1))[:, :count, None].astype(np.float32) if zeros else 1 << bits - 1
    whole = (values - zero) * scales.reshape(columns, count, 1)
    return np.ascontiguousarray(whole.reshape(columns, -1)[:, :rows].T)


def quantized_weights(path: Path, weights: Weights, model: PreTrainedModel) -> Weights:
    """The weights a checkpoint would have if it were what a quantised graph says.

    A tied embedding is quantised where it is the head and stays as it is where tokens are looked up.
    """
    matrices, stand = dequantized(path), dict[str, tuple[Callable[[], np.ndarray], bool]]()
    tables = {f"{prefix}.weight" for prefix, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    for names in parameter_names(model).values():
        for alias, suffix in itertools.product(names, ("", TRANSPOSED)):
            if alias + suffix in matrices:
                users = [name for name in names if name not in tables]
                stand |= dict.fromkeys(users, (matrices.pop(alias + suffix), bool(suffix)))
    assert not matrices, f"quantised matrices that are no parameters: {', '.join(matrices)}"

    def read(name: str) -> torch.Tensor:
        if name not in stand:
            return weights(name)
        matrix, transposed = stand[name]
        return torch.from_numpy(matrix().T if transposed else matrix())

    return read


def write_exact(path: Path, copy: Path) -> None:
    """A copy of a weight-only graph, beside it, that computes with the same weights in float32: `accuracy_level` 1."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                attribute.i = 1
    onnx.save(model, copy)
