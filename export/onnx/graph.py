"""A Hugging Face causal LM as one ONNX graph for ONNX Runtime and TensorRT (standard operators only)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from engines.base import INPUTS, KV_PAGE, EngineSpec, Step, input_shapes
from engines.kinds import FORMATS
from engines.pytorch.experts import GROUPED
from engines.pytorch.hook import StepModel, freeze_rope
from engines.pytorch.masked_attention import DECOMPOSED, NAME, UNCAPPED
from engines.quiet import quiet
from export.checkpoint.weights import Weights
from export.onnx.folding import fill, inputs_of, save, set_aside, substitute
from export.onnx.operators import operators

OPSET = {"operator": 24, "decomposed": 18}
"""By the form of attention. 18 is what the exporter writes without converting; TensorRT 10.0 and later read it."""
SCOPES = "pkg.torch.onnx.name_scopes"
"""Under this key torch's exporter keeps in a node's metadata the modules it came from, outermost first."""


def cache_names(layers: int, when: str) -> list[str]:
    """Names of the cache inputs (`past`) or outputs (`present`, `new`): keys of all layers, then values."""
    return [f"{when}_{kind}.{layer}" for kind in ("key", "value") for layer in range(layers)]


def write_graph(model: PreTrainedModel, weights: Weights, spec: EngineSpec, path: Path) -> None:
    """Export `model` to `path`, weights beside it in `<name>.data`.

    The graph is made from shapes; weights are read, converted and written one at a time while it is saved.

    Inputs: tokens, positions int64 [rows, steps]; mask bool [rows, 1, steps, length]; write_at int64 [rows]; keep
    int64 [kept]; past_key.i, past_value.i [rows, kv_heads, capacity, head_dim]. Outputs: logits [rows, kept, V];
    present_key.i, present_value.i, to be bound to the addresses of their pasts.

    With `spec.attention` decomposed, there is no operator newer than opset 18, and the graph writes no cache: in place
    of the presents it returns new_key.i, new_value.i [rows, kv_heads, steps, head_dim]. Every row's new columns must
    then lie within the mask. TensorRT formats get capped scores as their parts, because its Attention has no cap.

    Args:
        model: of `export.checkpoint.weights.empty_model`, in the engine's dtype.

    Raises:
        onnx.checker.ValidationError: the written file is not valid ONNX.
    """
    graph, parameters = trace_graph(model, spec)
    fill(graph, parameters, weights, prefix="model.")
    for node in graph.graph.all_nodes():  # what else is noted beside them quotes source code with this machine's paths
        for key in node.metadata_props.keys() - {SCOPES}:
            del node.metadata_props[key]
    save(graph, path)
    _tidy(path, spec)
    onnx.checker.check_model(str(path), full_check=True)


def trace_graph(model: PreTrainedModel, spec: EngineSpec) -> tuple[ir.Model, dict[str, torch.dtype]]:
    """Return the graph of `write_graph` without the values of its parameters, and the dtypes of those by name."""
    rows, steps = 2, 3
    step = Step.causal(torch.zeros(rows, steps, dtype=torch.int64), KV_PAGE, spec.capacity, torch.tensor([0, 2]))
    buffer = torch.zeros(rows, spec.kv_heads, spec.capacity, spec.head_dim, dtype=spec.torch_dtype)
    keys, values = ([buffer.clone() for _ in range(spec.layers)] for _ in range(2))
    example = (*(getattr(step, name) for name in INPUTS), keys, values)
    dims = _dimensions(spec)

    def dynamic(name: str) -> dict[int, Any]:
        return {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(dims[name]) if isinstance(size, str)}

    cache = [dynamic("past_key.0")] * spec.layers
    shapes = (*map(dynamic, INPUTS), cache, cache)
    freeze_rope(model)
    decomposed = spec.attention == "decomposed"
    planned = FORMATS[spec.format].stored == "plan"
    attention = DECOMPOSED if decomposed else UNCAPPED if planned else NAME
    step_model = StepModel(model, attention, "batched_mm" if decomposed or planned else GROUPED)
    with contextlib.nullcontext() if decomposed else operators(model), quiet(), torch.no_grad():
        program = torch.onnx.export(
            step_model,
            example,
            dynamo=True,
            opset_version=OPSET[spec.attention],
            dynamic_shapes=shapes,
            verbose=False,
            optimize=False,
            input_names=[*INPUTS, *cache_names(spec.layers, "past")],
            output_names=["logits", *cache_names(spec.layers, "new" if decomposed else "present")],
        )
        assert program is not None
        parameters = set_aside(program.model)
        _split_gemm(program.model.graph)
        program.optimize()
    return program.model, parameters


def _split_gemm(graph: ir.Graph) -> None:
    """Make each Gemm a MatMul and an Add: ONNX Runtime's quantisers know no Gemm, and its optimizer makes one again."""
    for node in [node for node in graph if node.op_type == "Gemm"]:
        (a, b, *bias), how = inputs_of(node), node.attributes
        if how.get_int("transA", 0) or how.get_float("alpha", 1.0) != 1.0 or how.get_float("beta", 1.0) != 1.0:
            continue
        nodes = []
        if how.get_int("transB", 0):
            nodes.append(ir.node("Transpose", [b], {"perm": [1, 0]}, name=f"{node.name}_transpose"))
            turned = nodes[-1].outputs[0]
            assert b.shape is not None
            turned.type, turned.shape, b = b.type, ir.Shape(reversed(b.shape)), turned
        nodes.append(ir.node("MatMul", [a, b], name=f"{node.name}_product"))
        if bias:
            nodes.append(ir.node("Add", [nodes[-1].outputs[0], bias[0]], name=f"{node.name}_sum"))
        substitute(graph, node, nodes)


def _dimensions(spec: EngineSpec) -> dict[str, tuple[str | int, ...]]:
    """Shape of each input and output of a graph; named dimensions are dynamic.

    They are rows, tokens per row, columns of the mask, and positions with logits. TensorRT asks for a static capacity.
    """
    dims = input_shapes(spec, "rows", "steps", "length", "kept")
    return {
        **dims,
        "logits": ("rows", "kept", spec.vocab_size),
        **dict.fromkeys(cache_names(spec.layers, "present"), dims["past_key.0"]),
        **dict.fromkeys(cache_names(spec.layers, "new"), ("rows", spec.kv_heads, "steps", spec.head_dim)),
    }


def _tidy(path: Path, spec: EngineSpec) -> None:
    """Give each dimension one name in all inputs and outputs; the exporter invents one per tensor."""
    names = _dimensions(spec)
    graph = onnx.load(path, load_external_data=False)
    del graph.graph.value_info[:]  # intermediate shapes still carry the invented names
    for value in [*graph.graph.input, *graph.graph.output]:
        shape = value.type.tensor_type.shape
        for dim, name in zip(shape.dim, names[value.name], strict=True):
            dim.Clear()
            if isinstance(name, str):
                dim.dim_param = name
            else:
                dim.dim_value = name
    graph.graph.ClearField("metadata_props")
    graph.producer_name, graph.producer_version = "mtad", ""
    onnx.save(graph, path)
