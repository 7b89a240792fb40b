"""Quantised engines: their graphs are the checkpoint's up to quantisation, and what that costs is measured and told."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import PreTrainedModel

from engines.folder import open_engine, read_spec, write_spec
from engines.kinds import QUANTIZED
from engines.onnx.engine import OnnxRuntimeEngine
from engines.placement import Placement
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.weights import Weights, filled
from export.onnx.folding import TRANSPOSED
from export.options import ExportOptions
from export.pair import export_pair
from export.plan import plan_pair
from export.quantization.report import compare_on_text, logits_on
from export.quantization.weight_only import (
    WEIGHT_ONLY,
    block_size,
    dequantized,
    quantize_graph,
    quantized_weights,
    write_exact,
)
from export.verification.check import check
from export.verification.verify import ACTIVATIONS, TOLERANCE, expect, verify, verify_activations
from mtad.errors import InvalidInput, VerificationFailed
from tests.support.steps import alone_and_together, some_tokens

KINDS = ("opt", "phi-3", "gemma-2", "gpt-2", "tied")
"""Gemm with biases, fused weights, soft caps, matrices that are stored transposed, tied embeddings."""
every_kind = pytest.mark.parametrize(
    ("family", "precision"), [*((family, "int4") for family in KINDS), ("opt", "int8"), ("tied", "int8")]
)


@pytest.fixture(scope="module")
def quantized(
    family_engine: Callable[[str], Path],
    family_checkpoint: Callable[[str], Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], Path]:
    """A family's quantised engine folder."""
    parent = tmp_path_factory.mktemp("quantized")

    @functools.cache
    def write(family: str, precision: str) -> Path:
        source, folder = family_engine(family), parent / f"{family}-{precision}"
        folder.mkdir()
        names = dict(family_checkpoint(family).empty("float32").named_parameters(remove_duplicate=False))
        quantize_graph(source / "model.onnx", folder / "model.onnx", precision, names, {})
        write_spec(folder, replace(read_spec(source), precision=precision))
        return folder

    return write


def reference_of(checkpoint: Checkpoint, path: Path) -> tuple[PreTrainedModel, Weights]:
    """The checkpoint's model, and the weights that the graph at `path` has."""
    model = checkpoint.empty("float32")
    model.set_attn_implementation("eager")
    return model, quantized_weights(path, checkpoint.weights(), model)


@pytest.mark.slow
@every_kind
def test_computed_in_float32_the_graph_is_the_checkpoint_with_the_same_weights(
    family: str,
    precision: str,
    family_checkpoint: Callable[[str], Checkpoint],
    quantized: Callable[[str, str], Path],
) -> None:
    folder = quantized(family, precision)
    write_exact(folder / "model.onnx", folder / "exact.onnx")
    exact = OnnxRuntimeEngine(folder, read_spec(folder), 1, "exact.onnx")
    model, weights = reference_of(family_checkpoint(family), folder / "model.onnx")
    with filled(model, weights, torch.float32) as reference:
        assert verify(exact, expect(reference, exact.spec)) <= TOLERANCE["float32"]


@pytest.mark.slow
@every_kind
def test_quantised_activations_stay_near_the_checkpoint_with_the_same_weights(
    family: str, precision: str, family_checkpoint: Callable[[str], Checkpoint], quantized: Callable[[str, str], Path]
) -> None:
    engine = open_engine(quantized(family, precision))
    model, weights = reference_of(family_checkpoint(family), quantized(family, precision) / "model.onnx")
    with filled(model, weights, torch.float32) as reference:
        assert verify_activations(engine, expect(reference, engine.spec)) <= ACTIVATIONS[precision]
        if family == "tied":
            other = open_engine(quantized(family, precision), Placement(provider="openvino", kv_cache="u8"))
            assert verify_activations(other, expect(reference, engine.spec)) <= ACTIVATIONS[precision]
    flipped = filled(model, lambda name: weights(name).flip(0), torch.float32)
    with flipped as wrong:
        expected = expect(wrong, engine.spec)
    with pytest.raises(VerificationFailed, match="of their spread"):
        verify_activations(engine, expected)


@pytest.mark.slow
@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_quantised_weight_is_within_half_a_step_of_the_checkpoints(
    precision: str, family_checkpoint: Callable[[str], Checkpoint], quantized: Callable[[str, str], Path]
) -> None:
    weights = family_checkpoint("gemma-2").weights()
    found = dequantized(quantized("gemma-2", precision) / "model.onnx")
    assert len(found) == 8
    for name, matrix in found.items():
        ours, theirs = matrix(), weights(name.removesuffix(TRANSPOSED)).T.numpy()
        size, half = block_size(len(theirs)), 2 ** (WEIGHT_ONLY[precision] - 1)
        assert len(theirs) % size == 0
        for start in range(0, len(theirs), size):
            block, found_block = theirs[start : start + size], ours[start : start + size]
            largest = np.take_along_axis(block, np.abs(block).argmax(0)[None], 0)  # of each column
            steps = -block * half / largest
            assert (np.abs(-found_block * half / largest - np.clip(steps, -half, half - 1)) <= 0.51).all()
            assert (np.abs(found_block - block) > 0).any()


@pytest.mark.slow
@every_kind
def test_every_matrix_but_the_embedding_is_quantised(
    family: str, precision: str, quantized: Callable[[str, str], Path]
) -> None:
    model = onnx.load(quantized(family, precision) / "model.onnx", load_external_data=False)
    kinds = [node.op_type for node in model.graph.node]
    levels = [a.i for node in model.graph.node for a in node.attribute if a.name == "accuracy_level"]
    assert "MatMulNBits" in kinds
    assert not {"MatMul", "Gemm"} & set(kinds)
    assert levels == [4] * kinds.count("MatMulNBits")
    large = [t for t in model.graph.initializer if len(t.dims) == 2 and t.data_type == onnx.TensorProto.FLOAT]
    gathered = {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
    assert {t.name for t in large if min(t.dims) > 8} <= gathered


@pytest.mark.slow
@pytest.mark.parametrize("precision", WEIGHT_ONLY)
def test_a_rows_logits_depend_on_the_batch_by_no_more_than_rounding(
    precision: str, quantized: Callable[[str, str], Path]
) -> None:
    for alone, whole in alone_and_together(open_engine(quantized("gemma-2", precision))):
        torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-4)


class TestReport:
    def test_logits_and_perplexity_are_the_checkpoints(
        self, family_checkpoint: Callable[[str], Checkpoint], family_engine: Callable[[str], Path]
    ) -> None:
        checkpoint, text = family_checkpoint("gemma-2"), some_tokens(3, 150)
        engine = open_engine(family_engine("gemma-2"))
        with torch.no_grad():
            expected = checkpoint.load(torch.float32)(text[None]).logits[0, :-1]
        torch.testing.assert_close(logits_on(engine, text.tolist()), expected, rtol=1e-4, atol=1e-4)
        loss = torch.nn.functional.cross_entropy(expected, text[1:])
        found = compare_on_text(engine, engine, [text.tolist()])
        assert found["perplexity"]["engine"] == pytest.approx(float(loss.exp()), rel=1e-4)
        assert found["argmax_agreement"] == 1.0
        assert compare_on_text(engine, engine, [[5], some_tokens(2, 400).tolist()])["tokens"] == 255, "what a row holds"

    @pytest.mark.slow
    def test_differences_are_those_of_the_distributions(
        self, family_engine: Callable[[str], Path], quantized: Callable[[str, str], Path]
    ) -> None:
        engines = open_engine(family_engine("gemma-2")), open_engine(quantized("gemma-2", "int4"))
        text = some_tokens(4, 40).tolist()
        found = compare_on_text(*engines, [text])
        ours, theirs = (torch.log_softmax(logits_on(engine, text).double(), -1) for engine in engines)
        divergence = (ours.exp() * (ours - theirs)).sum(-1)
        assert found["kl_nats"]["mean"] == pytest.approx(float(divergence.mean()), rel=1e-3)
        assert found["kl_nats"]["max"] == pytest.approx(float(divergence.max()), rel=1e-3)
        assert found["logits"]["max"] == pytest.approx(
            float((logits_on(engines[0], text) - logits_on(engines[1], text)).abs().max())
        )


@pytest.fixture(scope="module")
def mixed(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target in int4, and in float32 as the auxiliary; no text is given."""
    folder = tmp_path_factory.mktemp("mixed") / "pair"
    sizes: dict[str, Any] = {"rows": 2, "capacity": 192, "precision": "int4", "auxiliary_precision": "float32"}
    export_pair(folder, ExportOptions(*[str(checkpoints[0])] * 2, **sizes))
    return folder


class TestPair:
    def test_a_report_says_when_it_was_measured_on_bundled_text(
        self, checkpoints: tuple[Path, Path], calibration: Path
    ) -> None:
        options = ExportOptions(*map(str, checkpoints), capacity=192, precision="int4", auxiliary_precision="float32")
        bundled, own = (plan_pair(replace(options, calibration=text)).calibration for text in (None, calibration))
        assert bundled is not None
        assert own is not None
        assert bundled.bundled
        assert len(bundled.texts["target"]) > 10
        assert not own.bundled
        assert own.sha256 != bundled.sha256

    @pytest.mark.slow
    def test_a_check_wants_to_be_told_what_it_may_differ_by(self, mixed: Path) -> None:
        with pytest.raises(InvalidInput, match=r"tolerance.*int4.*quantization\.json"):
            check(mixed / "target")
        found = check(mixed / "target", allowed=2.0)
        assert found.same
        assert found.error > TOLERANCE["float32"]
        assert check(mixed / "auxiliary").same

    @pytest.mark.slow
    def test_each_engine_has_its_own_precision_and_a_report_says_what_it_cost(self, mixed: Path) -> None:
        specs = [read_spec(mixed / name) for name in ("target", "auxiliary")]
        assert [(spec.precision, spec.dtype) for spec in specs] == [("int4", "float32"), ("float32", "float32")]
        assert not (mixed / "auxiliary" / "quantization.json").exists()
        assert not (mixed / "target" / "exact.onnx").exists()
        report = json.loads((mixed / "target" / "quantization.json").read_text())
        size = sum(file.stat().st_size for file in (mixed / "target").glob("model.*"))
        assert report["precision"] == "int4"
        assert report["bytes"]["engine"] == size < report["bytes"]["float32"]
        assert report.keys() >= {"versions", "verification", "bytes"}
        assert report["text"]["bundled"], "and says so"
        assert report["text"]["tokens"] > 40
        assert 0 < report["text"]["kl_nats"]["mean"] < report["text"]["kl_nats"]["max"]
        assert report["text"]["perplexity"]["engine"] != report["text"]["perplexity"]["float32"]
        assert report["verification"]["computed_in_float32"] <= TOLERANCE["float32"]
        assert 0 < report["verification"]["activations"] <= ACTIVATIONS["int4"]
