"""8-bit products for TensorRT: Model Optimizer really runs, plans are really built, their graphs are measured."""

from __future__ import annotations

import collections
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from engines.folder import read_spec
from engines.onnx.engine import OnnxRuntimeEngine
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.weights import filled, parameter_names
from export.onnx.graph import write_graph
from export.onnx.widen import rounded, write_widened
from export.options import STATIC, ExportOptions
from export.pair import export_pair
from export.quantization.model_optimizer import LONGEST, TOKENS, Quantized, _cut, calibrate
from export.quantization.qdq import product_names, write_quantized
from export.quantization.weight_only import quantized_weights
from export.tensorrt import build_plan, plan_for
from export.verification.verify import ACTIVATIONS, WIDENED, expect, verify, verify_activations
from mtad.errors import InvalidInput
from runtime.tuning.efficiency import block_efficiency
from tests.support.tensorrt import PLAN, SPEC

TARGETS = ["8.9", "12.0"]
"""Compute capabilities: Ada Lovelace, Blackwell."""


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "text.jsonl"
    lines = ["SELECT name FROM singer WHERE age", "def largest(values): return", "How many singers are older"]
    path.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return path


def export(folder: Path, checkpoints: tuple[Path, Path], calibration: Path | None, **changes: Any) -> bool:
    options: dict[str, Any] = {
        "rows": 2,
        "capacity": 128,
        "format": "tensorrt-rtx",
        "compute_capabilities": TARGETS,
        "precision": "fp8",
        "auxiliary_precision": "int8-static",
        "calibration": calibration,
        **changes,
    }
    return export_pair(folder, ExportOptions(*map(str, checkpoints), **options), block_efficiency=block_efficiency)


@pytest.fixture(scope="module")
def pair(checkpoints: tuple[Path, Path], calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in fp8 and an auxiliary in int8, through the whole export."""
    folder = tmp_path_factory.mktemp("static") / "pair"
    assert export(folder, checkpoints, calibration)
    assert list(folder.parent.iterdir()) == [folder]
    return folder


class TestPair:
    @pytest.mark.slow
    def test_each_engine_is_a_plan_of_its_own_precision(self, pair: Path) -> None:
        for name, precision in (("target", "fp8"), ("auxiliary", "int8-static")):
            files = {file.name for file in (pair / name).iterdir()}
            assert files == {
                *("engine.json", "model.engine", "quantization.json", "tokenizer.json", "tokenizer_config.json")
            }
            spec = read_spec(pair / name)
            assert (spec.precision, spec.dtype) == (precision, "float16")
            assert spec.plan is not None
            assert spec.plan.compute_capabilities == tuple(TARGETS)
            assert spec.versions["nvidia-modelopt"]

    @pytest.mark.slow
    def test_a_report_tells_what_was_executed_and_no_time_that_was_not(self, pair: Path) -> None:
        for name, precision in (("target", "fp8"), ("auxiliary", "int8-static")):
            report = json.loads((pair / name / "quantization.json").read_text())
            assert report["precision"] == precision
            assert "on a CPU" in report["executed"]
            assert "step" not in report
            assert report["bytes"]["engine"] == (pair / name / "model.engine").stat().st_size
            assert report["verification"]["computed_in_float32"] <= WIDENED["float16"]
            assert 0 < report["verification"]["activations"] <= ACTIVATIONS[precision]
            assert report["text"]["perplexity"]["engine"] != report["text"]["perplexity"]["float32"]
            assert report["block_efficiency"]["precisions"] == ["fp8", "int8-static"]
            assert report["block_efficiency"]["mtad"]["pair"]["tokens_per_pass"] > 1

    @pytest.mark.slow
    def test_the_same_export_again_touches_nothing(
        self, pair: Path, checkpoints: tuple[Path, Path], calibration: Path
    ) -> None:
        assert not export(pair, checkpoints, calibration)


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


def steps_of(matrix: np.ndarray, largest: float, number: np.dtype[Any]) -> Quantized:
    """A weight in 8 bits with a step for each column, activations in steps of 0.05."""
    steps = np.abs(matrix).max(0) / largest
    values = matrix / steps
    return Quantized(0.05, lambda: (np.round(values) if number == np.int8 else values).astype(number), lambda: steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "dtype"), [("opt", "fp8", "bfloat16"), ("tied", "int8-static", "float16")]
)
def test_without_quantised_activations_the_graph_is_the_checkpoint_with_the_same_weights(
    family: str,
    precision: str,
    dtype: str,
    family_checkpoint: Callable[[str], Checkpoint],
    family_engine: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Of Gemm with biases, and of tied embeddings."""
    checkpoint, source = family_checkpoint(family), family_engine(family) / "model.onnx"
    spec = replace(checkpoint.spec(2, 128, precision, "tensorrt-rtx"), dtype=dtype)
    weights, empty = rounded(checkpoint.weights(), spec.torch_dtype), checkpoint.empty("float32")
    names = {name for several in parameter_names(empty).values() for name in several}
    products = product_names(source, names)
    graph = onnx.load(source)
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in graph.graph.initializer}
    kind = onnx.helper.tensor_dtype_to_np_dtype(
        onnx.TensorProto.INT8 if precision != "fp8" else onnx.TensorProto.FLOAT8E4M3FN
    )
    largest = 448 if precision == "fp8" else 127
    found = {n.name: steps_of(stored[n.input[1]], largest, kind) for n in graph.graph.node if n.name in products}
    write_graph(checkpoint.empty(dtype), weights, spec, tmp_path / "half.onnx")
    write_quantized(tmp_path / "half.onnx", tmp_path / "model.onnx", precision, names, found)
    nodes = collections.Counter(
        node.op_type for node in onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.node
    )
    assert nodes["MatMul"] == len(products) > 6
    assert nodes["DequantizeLinear"] == len(products) + nodes["QuantizeLinear"]
    wide = replace(spec, format="onnx", dtype="float32")
    with filled(empty, quantized_weights(tmp_path / "model.onnx", weights, empty), torch.float32) as reference:
        reference.set_attn_implementation("eager")
        expected = expect(reference, wide)
    for activations, judge in ((False, partial(verify, allowed=1e-3)), (True, verify_activations)):
        write_widened(tmp_path / "model.onnx", tmp_path / "wide.onnx", activations)
        assert judge(OnnxRuntimeEngine(tmp_path, wide, 1, "wide.onnx"), expected) > 0
    if precision == "int8-static":  # for a GPU without float8
        spec = replace(spec, plan=plan_for("tensorrt-rtx", spec, ["8.6"]))
        build_plan(tmp_path / "model.onnx", spec, tmp_path / "model.engine")
        assert (tmp_path / "model.engine").stat().st_size > (tmp_path / "model.onnx.data").stat().st_size


@pytest.mark.parametrize(
    ("field", "changes", "problem"),
    [
        ("precision", {"compute_capabilities": ["8.6", "12.0"]}, "8.6 does not support it; 8.9 and later do"),
        ("precision", {"format": "onnx", "compute_capabilities": []}, "is for TensorRT"),
        ("precision", {"attention": "decomposed"}, "is for TensorRT .*decomposed"),
        ("auxiliary_precision", {"auxiliary_precision": "int8"}, "needs --to onnx"),
        ("calibration", {"calibration": None}, "give text"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    field: str, changes: dict[str, Any], problem: str, checkpoints: tuple[Path, Path], calibration: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        export(tmp_path / "pair", checkpoints, **{"calibration": calibration, **changes})
    assert caught.value.field == field
    assert not list(tmp_path.iterdir())


def test_without_capabilities_fp8_is_built_for_all_that_have_it() -> None:
    plan = plan_for("tensorrt-rtx", replace(SPEC, precision="fp8", dtype="float16"))
    assert plan.compute_capabilities[0] == "8.9"
    assert plan_for("tensorrt-rtx", replace(SPEC, precision="int8-static")).compute_capabilities[0] == "7.5"


def test_a_missing_model_optimizer_is_named_with_its_extra(
    checkpoints: tuple[Path, Path], calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "modelopt" else find(name, *rest)
    )
    with pytest.raises(InvalidInput, match=r"modelopt is not installed; pip install 'mtad\[modelopt\]'"):
        export(tmp_path / "pair", checkpoints, calibration)
    assert not list(tmp_path.iterdir())


def test_what_model_optimizer_says_last_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\n\nRuntimeError: no such graph\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    spec = replace(SPEC, precision="fp8", plan=PLAN)
    with pytest.raises(InvalidInput, match=r"Model Optimizer .* failed: RuntimeError: no such graph"):
        calibrate(tmp_path / "model.onnx", tmp_path, spec, ["node"], [[1, 2]])


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, InvalidInput("precision", "fp8", "refused")])
def test_an_export_that_ends_while_it_quantises_leaves_nothing(
    error: Any,
    checkpoints: tuple[Path, Path],
    calibration: Path,
    pair_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("export.pair.write_plain", lambda folder, *_: shutil.copytree(pair_folders("onnx"), folder))
    monkeypatch.setattr("export.engine.calibrate", fail)
    with pytest.raises(type(error) if isinstance(error, InvalidInput) else error):
        export(tmp_path / "pair", checkpoints, calibration)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("texts", [[], [[1]], [[1, 2]] * 3, [list(range(LONGEST + 9))] * 20])
def test_ranges_are_found_on_bounded_text(texts: Sequence[Sequence[int]]) -> None:
    parts = list(_cut(texts, LONGEST))
    assert all(2 <= len(part) <= LONGEST for part in parts)
    assert sum(map(len, parts)) <= TOKENS
    assert parts == [
        list(text[: len(part)]) for text, part in zip([t for t in texts if len(t) > 1], parts, strict=False)
    ]


def test_every_static_precision_has_a_tolerance() -> None:
    assert set(STATIC) <= set(ACTIVATIONS)
