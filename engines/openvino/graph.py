"""The exported graph as OpenVINO runs it: attention over a cache of pages, no second export.

`TensorScatter` becomes the new columns that it was to write, and `Attention` becomes OpenVINO's PagedAttention, whose
cache is a pool of pages and whose `qq_bias` says which new tokens see which. Written for OpenVINO 2026.4.1, whose
operator has 28 inputs: `_inputs`.
"""

from __future__ import annotations

import importlib
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from engines.base import EngineSpec
from mtad.errors import InvalidInput, imported

PAGE = 32
"""Columns of one page of the CPU plugin's cache."""

PARAMETERS = {
    "past_lens": 5,
    "subsequence_begins": 6,
    "block_indices": 7,
    "block_indices_begins": 8,
    "max_context_len": 12,
    "qq_bias": 26,
    "qq_bias_begins": 27,
}
"""Inputs of every PagedAttention that a step gives, by their place among the operator's."""


def load_openvino() -> ModuleType:
    """The module; imported when it is first needed, without `openvino_telemetry`, which would report the import.

    Raises:
        InvalidInput: it is not installed, or has no paged attention for this processor.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # its import fails; OpenVINO has a stub
    module = imported("openvino", "provider", "openvino", "the extra openvino installs it")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise _refused(f"its paged attention is for x86-64, and this machine is {platform.machine()}")
    return module


def computes_bfloat16() -> bool:
    """Whether OpenVINO's paged attention computes in bfloat16 on this CPU.

    It has to have AVX-512, which Winograd convolutions are a sign of: CPUs that have bfloat16 for AVX2 alone (Arrow
    Lake, Lunar Lake) are said to have it as well (`plugin.cpp`), and paged attention breaks there (`executor_pa.cpp`).
    """
    return {"BF16", "WINOGRAD"} <= set(load_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


def read_graph(path: Path, spec: EngineSpec) -> Any:
    """Read an exported graph as an `openvino.Model` with paged attention.

    Inputs: tokens, positions int64 [1, T]; keep int64 [N], places among the T tokens; of each layer i key_cache.i,
    value_cache.i, pages of the type and shape the plugin chooses; and `PARAMETERS`. Output: logits [1, N, V].

    Raises:
        InvalidInput: OpenVINO does not know an operator, or PagedAttention does not compute the model's attention.
    """
    if spec.attention != "operator":
        raise _refused(f"its attention is {spec.attention}; export with --attention operator")
    ov = load_openvino()
    frontend = importlib.import_module("openvino.frontend.onnx")
    core, refusals = ov.Core(), list[InvalidInput]()

    def attention(context: Any) -> list[Any]:
        try:
            return [_paged(context, spec)]
        except InvalidInput as error:  # OpenVINO would wrap it
            refusals.append(error)
            return [context.get_input(0)]

    core.add_extension(frontend.ConversionExtension("TensorScatter", lambda context: [context.get_input(1)]))
    core.add_extension(frontend.ConversionExtension("Attention", attention))
    try:
        model = core.read_model(path)
    except RuntimeError as error:
        raise _refused(f"OpenVINO cannot read the graph: {' '.join(str(error).split())}") from error
    if refusals:
        raise refusals[0]
    if sum(node.get_type_name() == "PagedAttentionExtension" for node in model.get_ops()) != spec.layers:
        raise _refused(f"{spec.architecture} has attention that is not one operator, such as one with sinks")
    return _with_parameters(model)


def transpose_weights(model: Any) -> None:
    """Let products have their weights as [N, K]: in bfloat16 the plugin fuses an MLP whose three products have them so.

    Read in OpenVINO's `mlp_fusion.cpp` and `llm_mlp.cpp`, whose MLP divides by half the number of threads, so that one
    thread would end the process. A Transpose before a product would be taken into the product again.
    """
    ov = load_openvino()
    op = _opset()
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul" or _kind(node.input_value(1)) != "Constant":
            continue
        weights, how = node.input_value(1).get_node(), node.get_attributes()
        if len(weights.shape) == 2 and not (how["transpose_a"] or how["transpose_b"]):
            transposed = ov.Tensor(weights.get_element_type(), ov.Shape(weights.shape[::-1]))
            transposed.data[...] = weights.data.T
            node.output(0).replace(op.matmul(node.input_value(0), op.constant(transposed), False, True).output(0))


def _refused(why: str) -> InvalidInput:
    return InvalidInput("provider", "openvino", f"{why}, or give provider cpu")


def _paged(context: Any, spec: EngineSpec) -> Any:
    """PagedAttention in place of an Attention, past what `engines.pytorch.masked_attention` put before it."""
    op = _opset()
    query, key, value, mask = (context.get_input(at) for at in range(4))
    if context.get_attribute("softcap", 0.0):
        raise _refused(f"{spec.architecture} caps its attention scores, which OpenVINO's paged attention cannot")
    if not _leads_to_input(mask):
        raise _refused(f"{spec.architecture} has a sliding window, which is not supported together with draft trees")
    key, value = (_input_before(x, "Slice") for x in (key, value))
    if "Slice" in (_kind(key), _kind(value)):
        raise _refused(f"{spec.architecture} has keys and values of several shapes, which its paged attention cannot")
    grouped, size = _kind(query) == "Reshape", spec.head_dim  # query heads of one KV head are queries of it
    query = _input_before(query, "Reshape" if grouped else "Concat")

    def tokens_first(x: Any) -> Any:
        """[1, H, T, D] as [T, H D]."""
        rows = op.reshape(op.transpose(x, _constant([0, 2, 1, 3], np.int64)), _constant([0, 0, -1], np.int64), True)
        return op.squeeze(rows, _constant([0], np.int64))

    scale = context.get_attribute("scale", size**-0.5)
    new = tuple(tokens_first(x) for x in (query, key, value))
    node = importlib.import_module("openvino.op")._PagedAttentionExtension(_inputs(new, scale, spec))
    for what in ("k", "v"):
        node.get_rt_info()[f"num_{what}_heads"] = spec.kv_heads
        node.get_rt_info()[f"{what}_head_size"] = size
    by_head = op.gather(op.shape_of(query), _constant([0, 2, 1, 3], np.int64), _constant(0, np.int64))
    out = op.transpose(op.reshape(node.output(0), by_head, False), _constant([0, 2, 1, 3], np.int64))
    folded = op.reshape(out, _constant([1, spec.kv_heads, -1, size], np.int64), False)
    return (folded if grouped else out).output(0)


def _opset() -> ModuleType:
    return importlib.import_module("openvino.opset13")


def _constant(value: Any, kind: Any) -> Any:
    return _opset().constant(np.array(value, kind)).output(0)


def _inputs(new: tuple[Any, ...], scale: float, spec: EngineSpec) -> list[Any]:
    """The 28 inputs of PagedAttention, in the operator's order.

    A converter can add no parameters, so those that a step gives are constants until `_with_parameters`.
    """
    pages = [_constant(np.zeros((1, spec.kv_heads, PAGE, spec.head_dim)), np.float32)] * 2
    whole, real, zero = _constant(np.zeros(0), np.int32), _constant(np.zeros(0), np.float32), _constant(0, np.int32)
    return [
        *(x.output(0) for x in new),
        *pages,
        *[whole] * 4,  # past_lens, subsequence_begins, block_indices, block_indices_begins
        _constant(scale, np.float32),
        zero,  # sliding window: none
        real,  # ALiBi slopes
        zero,  # max_context_len
        *[whole] * 3,  # which scores to return, rotated pages, their distances
        *[real] * 2,  # table of rotations, threshold of sparse attention
        *[zero] * 2,  # its block size and stride
        _constant(np.zeros((0, 0, 0, 0)), np.float32),  # attention sinks
        zero,  # start of adaptive eviction
        *[whole] * 4,  # its sizes, and what it keeps
        _constant(np.zeros(0), np.uint8),  # qq_bias
        whole,  # qq_bias_begins
    ]


def _with_parameters(model: Any) -> Any:
    ov = load_openvino()
    op = _opset()

    def parameter(name: str, shape: list[int], kind: Any) -> Any:
        made = op.parameter(ov.PartialShape(shape), kind, name)
        made.get_output_tensor(0).set_names({name})
        return made

    layers = [node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]
    given = {}
    for name in PARAMETERS:
        shape: list[int] = [] if name == "max_context_len" else [-1]
        given[name] = parameter(name, shape, ov.Type.u8 if name == "qq_bias" else ov.Type.i32)
    caches = []
    for layer, node in enumerate(layers):
        for at, kind in ((3, "key"), (4, "value")):
            caches.append(parameter(f"{kind}_cache.{layer}", [-1, -1, -1, -1], ov.Type.dynamic))
            node.input(at).replace_source_output(caches[-1].output(0))
        for name, at in PARAMETERS.items():
            node.input(at).replace_source_output(given[name].output(0))
    (logits,) = (result for result in model.get_results() if "logits" in result.input_value(0).get_names())
    own = {p.get_friendly_name(): p for p in model.get_parameters()}
    # of the mask nothing is left but its shape, which the exporter reads the number of tokens from
    count = op.gather(op.shape_of(own["tokens"]), _constant([1], np.int64), _constant(0, np.int64))
    blanks = op.concat([_constant([1, 1], np.int64), count, _constant([1], np.int64)], 0)
    blank = op.broadcast(_constant(True, np.bool_), blanks)
    for use in own["mask"].output(0).get_target_inputs():
        use.replace_source_output(blank.output(0))
    first = [own[name] for name in ("tokens", "positions", "keep")]
    return ov.Model([logits], [*first, *caches, *given.values()], "paged")


def _kind(output: Any) -> str:
    return str(output.get_node().get_type_name())


def _input_before(output: Any, kind: str) -> Any:
    """What the one operator of this kind was given, which the exporter put before attention."""
    if _kind(output) != kind:
        raise _refused(f"the graph has {_kind(output)} before its attention where {kind} is expected")
    return output.get_node().input_value(0)


def _leads_to_input(mask: Any) -> bool:
    """Whether a mask is the step's own, only repeated: nothing but shapes changed on its way."""
    while _kind(mask) in ("Reshape", "Broadcast", "Concat", "Slice"):
        mask = mask.get_node().input_value(0)
    return _kind(mask) == "Parameter"
