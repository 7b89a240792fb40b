"""8-bit products for TensorRT: Model Optimizer really runs, plans are really built, their graphs are measured."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from engines.onnx.engine import OnnxRuntimeEngine
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.weights import filled, parameter_names
from export.onnx.graph import write_graph
from export.onnx.widen import rounded, write_widened
from export.quantization.model_optimizer import LONGEST, TOKENS, quantize_static
from export.quantization.weight_only import matrices, quantized_weights
from export.tensorrt import build_plan, plan_for
from export.verification.verify import expect, verify, verify_activations
from mtad.errors import InvalidInput
from tests.support.tensorrt import PLAN, SPEC


@pytest.mark.parametrize("kind", [onnx.TensorProto.INT8, onnx.TensorProto.FLOAT8E4M3FN])
def test_a_pair_computed_by_plain_operators_is_the_operators(kind: int, tmp_path: Path) -> None:
    helper, step = onnx.helper, 0.03125
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["eight"]),
        helper.make_node("DequantizeLinear", ["eight", "step", "zero"], ["y"]),
        helper.make_node("Neg", ["y"], ["negative"]),
    ]
    shapes = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in ("x", "negative")]
    constants = [helper.make_tensor("step", 1, [], [step]), helper.make_tensor("zero", kind, [], [0])]
    graph = helper.make_graph(nodes, "pair", shapes[:1], shapes[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.save(model, tmp_path / "model.onnx")
    write_widened(tmp_path / "model.onnx", tmp_path / "wide.onnx")
    write_widened(tmp_path / "model.onnx", tmp_path / "plain.onnx", activations=False)
    x = np.concatenate([np.arange(-300, 300, dtype=np.float32) * step / 2, [9.0, -9.0, 99.0]]).astype(np.float32)
    given, wide, plain = (
        ort.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for name in ("model", "wide", "plain")
    )
    assert np.array_equal(given, wide)
    assert np.array_equal(plain, -x)
    assert not np.array_equal(wide, plain)


def test_a_loop_of_16_bit_numbers_is_widened_as_a_whole(tmp_path: Path) -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    value, narrow = helper.make_tensor_value_info, kinds.BFLOAT16
    nodes = [helper.make_node("Identity", ["on"], ["still"]), helper.make_node("Add", ["x_in", "x_in"], ["x_out"])]
    inputs = [value("at", kinds.INT64, []), value("on", kinds.BOOL, []), value("x_in", narrow, ["n"])]
    outputs = [value("still", kinds.BOOL, []), value("x_out", narrow, ["n"])]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    loop = helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)
    constants = [helper.make_tensor("count", kinds.INT64, [], [3])]
    graph = helper.make_graph([loop], "loop", [value("x", narrow, ["n"])], [value("y", narrow, ["n"])], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.save(model, tmp_path / "model.onnx")
    write_widened(tmp_path / "model.onnx", tmp_path / "wide.onnx")
    session = ort.InferenceSession(tmp_path / "wide.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.array([1.0, 2.0], np.float32)})
    assert found.tolist() == [8.0, 16.0]


@pytest.mark.slow
def test_without_quantised_activations_the_graph_is_the_checkpoint_with_the_same_weights(
    family_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """Of Gemm with biases; a plan of it for a GPU without float8 is built."""
    checkpoint = family_checkpoint("opt")
    spec = checkpoint.spec(2, 128, "int8-static", "tensorrt-rtx")
    weights, empty = rounded(checkpoint.weights(), spec.torch_dtype), checkpoint.empty("float32")
    write_graph(checkpoint.empty(spec.dtype), weights, spec, tmp_path / "half.onnx")
    names = {name for several in parameter_names(empty).values() for name in several}
    products = [str(node.name) for node in matrices(ir.load(tmp_path / "half.onnx").graph, names)]
    assert len(products) > 6
    quantize_static(tmp_path / "half.onnx", tmp_path / "model.onnx", spec, products, [list(range(5, 90))])
    wide = replace(spec, format="onnx", dtype="float32")
    with filled(empty, quantized_weights(tmp_path / "model.onnx", weights, empty), torch.float32) as reference:
        reference.set_attn_implementation("eager")
        expected = expect(reference, wide)
    for activations, judge in ((False, partial(verify, allowed=1e-3)), (True, verify_activations)):
        write_widened(tmp_path / "model.onnx", tmp_path / "wide.onnx", activations)
        assert judge(OnnxRuntimeEngine(tmp_path, wide, 1, "wide.onnx"), expected) > 0
    spec = replace(spec, plan=plan_for("tensorrt-rtx", spec, ["8.6"]))
    build_plan(tmp_path / "model.onnx", spec, tmp_path / "model.engine")
    assert (tmp_path / "model.engine").stat().st_size > (tmp_path / "model.onnx_data").stat().st_size


def test_without_capabilities_fp8_is_built_for_all_that_have_it() -> None:
    plan = plan_for("tensorrt-rtx", replace(SPEC, precision="fp8", dtype="float16"))
    assert plan.compute_capabilities[0] == "8.9"
    assert plan_for("tensorrt-rtx", replace(SPEC, precision="int8-static")).compute_capabilities[0] == "7.5"


def test_a_missing_model_optimizer_is_named_with_its_extra(
    rtx_export: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "modelopt" else find(name, *rest)
    )
    with pytest.raises(InvalidInput, match="modelopt is not installed; the extra quantized"):
        rtx_export(tmp_path / "pair")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("texts", [[[1, 2]], [[1, 2]] * 3, [list(range(LONGEST + 9))] * 20])
def test_it_is_given_bounded_text_and_what_it_says_last_is_the_error(
    texts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\n\nRuntimeError: no such graph\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    spec = replace(SPEC, precision="fp8", plan=PLAN)
    with pytest.raises(InvalidInput, match=r"Model Optimizer .* failed: RuntimeError: no such graph"):
        quantize_static(tmp_path / "half.onnx", tmp_path / "model.onnx", spec, ["node"], texts)
    inputs = np.load(tmp_path / "model.npz")
    joined = [token for text in texts for token in text]
    assert inputs["tokens"].ravel().tolist() == joined[: inputs["tokens"].size]
    assert inputs["tokens"].size <= TOKENS
    assert inputs["tokens"].shape[1] <= LONGEST
    assert len(inputs["past_key.0"]) == len(inputs["tokens"])
