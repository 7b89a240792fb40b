"""One checkpoint to the files of one engine, verified; of a quantised one, what it costs."""

from __future__ import annotations

import gc
import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engines.base import EngineSpec
from engines.folder import open_model, read_json, write_json, write_spec
from engines.kinds import FORMATS, GRAPH
from engines.onnx.engine import OnnxRuntimeEngine
from engines.placement import Placement
from engines.pytorch.hook import set_arithmetic
from engines.tensorrt_plan import check_plan, current_gpu
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.weights import Weights, filled, read_buffers, stored_packed
from export.onnx.folding import save
from export.onnx.graph import write_graph
from export.onnx.widen import rounded, write_widened
from export.options import MEASURED, Progress
from export.plan import PairPlan
from export.quantization.model_optimizer import quantize_static
from export.quantization.report import REPORT, Calibration, measure
from export.quantization.weight_only import matrices, quantize_graph, quantized_weights, write_exact
from export.verification.verify import WIDENED, Expectation, expect, few_rows, verify, verify_activations
from mtad.errors import InvalidInput, first_line

log = logging.getLogger(__name__)

PLAIN, EXECUTED = "float32", "executed"
"""Folders, for a while, of the float32 pair that quantised engines are made of, and of what runs for plans."""


def write_engine(
    folder: Path, checkpoint: Checkpoint, spec: EngineSpec, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> None:
    """An engine into an empty folder, all but its `engine.json`: nothing opens it before it is verified."""
    kind, weights, threads = FORMATS[spec.format], checkpoint.weights(), torch.get_num_threads()
    compiled = kind.compiles == "checkpoint"
    progress(f"{checkpoint.name}: {'build' if compiled else 'export'}")
    if compiled:
        from export.tensorrt_llm import build as library

        library.build_plan(folder, checkpoint, spec)
    elif kind.of_graph:
        trace(checkpoint, weights, spec, folder / "model.onnx")
    else:
        checkpoint.load(spec.torch_dtype).save_pretrained(folder, max_shard_size=2**63)
    tokenizer.save_pretrained(folder)
    progress(f"{checkpoint.name}: verify")
    written, empty = few_rows(spec), checkpoint.empty("float32")
    if kind.of_graph:
        written = replace(written, format=GRAPH, plan=None)
    if kind.of_graph and spec.dtype == "bfloat16":
        _verify_widened(folder, spec, weights, empty)
    else:
        verify(open_model(folder, written, Placement(threads=threads)), expectation(empty, weights, spec))
    if kind.of_graph and spec.plan is not None and build(folder, checkpoint, spec, progress):
        verify(open_model(folder, few_rows(spec)), expectation(empty, weights, spec))


def trace(checkpoint: Checkpoint, weights: Weights, spec: EngineSpec, path: Path) -> None:
    """Write the graph of an engine.

    Raises:
        InvalidInput: the model cannot be written as one.
    """
    try:
        write_graph(read_buffers(checkpoint.empty(spec.dtype), weights), weights, spec, path)
    except (torch.onnx.OnnxExporterError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        problem = f"{spec.architecture} cannot be written as an ONNX graph: {first_line(error.__cause__ or error)}"
        raise InvalidInput(checkpoint.name, str(checkpoint.folder), problem) from error


def build(folder: Path, checkpoint: Checkpoint, spec: EngineSpec, progress: Progress) -> bool:
    """Build the plan of a verified graph, which goes; returns whether the plan runs here."""
    from export.tensorrt import build_plan

    assert spec.plan is not None
    progress(f"{checkpoint.name}: build")
    build_plan(folder / "model.onnx", spec, folder / "model.engine")
    for file in [folder / "model.onnx", *folder.glob("model*.data")]:
        file.unlink()
    try:
        check_plan(spec.format, spec.plan, spec.plan.version, current_gpu())
    except InvalidInput:
        log.warning("the %s's plan was built but not run, for want of its GPU; its graph was verified", checkpoint.name)
        return False
    return True


def expectation(empty: PreTrainedModel, weights: Weights, spec: EngineSpec) -> Expectation:
    """What the checkpoint with these weights says, in float32 with its own attention."""
    with filled(read_buffers(empty, weights), weights, torch.float32) as reference:
        set_arithmetic(reference, "eager", "eager")
        return expect(reference, spec)


def _verify_widened(folder: Path, spec: EngineSpec, weights: Weights, empty: PreTrainedModel) -> None:
    """Verify a bfloat16 graph, which no CPU runs, by its copy in float32 against the checkpoint with rounded weights.

    The rounding of its arithmetic is left to the GPU; a plan that runs here is then verified with that as well.
    """
    expected = expectation(empty, rounded(weights, spec.torch_dtype), spec)
    write_widened(folder / "model.onnx", folder / "wide.onnx")
    wide = replace(few_rows(spec), format=GRAPH, dtype="float32", plan=None)
    engine = OnnxRuntimeEngine(folder, wide, torch.get_num_threads(), "wide.onnx")
    verify(engine, expected, allowed=WIDENED[spec.dtype])
    for file in folder.glob("wide*"):
        file.unlink()


def write_plain(folder: Path, plan: PairPlan, progress: Progress) -> None:
    """The pair in float32, which quantised engines are made of and compared with."""
    folder.mkdir()
    for checkpoint, spec, tokenizer in plan.engines:
        own = replace(spec, precision="float32", dtype="float32", format=GRAPH, plan=None, build_hash="")
        (folder / checkpoint.name).mkdir()
        write_engine(folder / checkpoint.name, checkpoint, own, tokenizer, progress)
        write_spec(folder / checkpoint.name, own)
    write_json(folder / "pair.json", plan.description)


def quantize_engine(source: Path, folder: Path, checkpoint: Checkpoint, spec: EngineSpec, progress: Progress) -> None:
    """A quantised copy of the float32 engine at `source`, checked, into an empty folder, all but its `engine.json`.

    Two steps, so that neither tolerance hides the other's error: computed in float32, the quantised graph has to be the
    checkpoint with the same quantised weights; as it will run, with quantised activations, it has to be near that.
    """
    progress(f"{checkpoint.name}: quantise")
    copy_without_model(source, folder)
    spec, empty, threads = few_rows(spec), checkpoint.empty("float32"), torch.get_num_threads()
    names = set(dict(empty.named_parameters(remove_duplicate=False)))
    packing = checkpoint.packing if checkpoint.is_packed(spec.precision) else None
    packed = {} if packing is None else stored_packed(checkpoint.folder, packing)
    quantize_graph(source / "model.onnx", folder / "model.onnx", spec.precision, names, packed)
    gc.collect()  # the nodes of a graph refer to each other, and hold its arrays
    progress(f"{checkpoint.name}: verify")
    weights = checkpoint.weights()
    if not packed:  # whose weights are to be the checkpoint's own
        weights = quantized_weights(folder / "model.onnx", weights, empty)
    expected, exact = expectation(empty, weights, spec), folder / "exact.onnx"
    write_exact(folder / "model.onnx", exact)
    found = {"computed_in_float32": verify(OnnxRuntimeEngine(folder, spec, threads, exact.name), expected)}
    exact.unlink()
    found["activations"] = verify_activations(open_model(folder, spec, Placement(threads=threads)), expected)
    write_json(folder / REPORT, {"versions": {"onnxruntime": onnxruntime.__version__}, "verification": found})


def write_static(
    source: Path,
    folder: Path,
    executed: Path,
    checkpoint: Checkpoint,
    spec: EngineSpec,
    texts: Sequence[Sequence[int]],
    progress: Progress,
) -> None:
    """A plan with 8-bit products into an empty folder, all but its `engine.json`.

    Verified in two steps, as other quantised engines are, on the very graph that the plan is built from, widened to
    float32: without the quantisation of activations it has to be the checkpoint with the same quantised weights; with
    it, it has to be near that. A plan whose GPU is here is compared as well.

    Args:
        executed: folder for an engine of the graph with all of its quantisation, in float32, for ONNX Runtime.
    """
    progress(f"{checkpoint.name}: quantise")
    for copy in (folder, executed):
        copy_without_model(source, copy)
    weights, empty = rounded(checkpoint.weights(), spec.torch_dtype), checkpoint.empty("float32")
    names = set(dict(empty.named_parameters(remove_duplicate=False)))
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        half, quantized = Path(temporary, "half.onnx"), Path(temporary, "quantized.onnx")
        trace(checkpoint, weights, spec, half)
        products = [str(node.name) for node in matrices(ir.load(half).graph, names)]
        quantize_static(half, quantized, spec, products, texts)
        save(ir.load(quantized), folder / "model.onnx")
    progress(f"{checkpoint.name}: verify")
    wide = replace(few_rows(spec), format=GRAPH, dtype="float32", precision="float32", plan=None)
    expected = expectation(empty, quantized_weights(folder / "model.onnx", weights, empty), spec)
    figures: dict[str, float] = {}
    for name, activations, judge in (
        ("computed_in_float32", False, partial(verify, allowed=WIDENED[spec.dtype])),
        ("activations", True, partial(verify_activations, precision=spec.precision)),
    ):
        for file in executed.glob("model*"):
            file.unlink()
        write_widened(folder / "model.onnx", executed / "model.onnx", activations)
        figures[name] = judge(open_model(executed, wide, Placement(threads=torch.get_num_threads())), expected)
    write_spec(executed, wide)
    if build(folder, checkpoint, spec, progress):
        figures["plan"] = verify_activations(open_model(folder, few_rows(spec)), expected)
    versions = {"nvidia-modelopt": spec.versions["nvidia-modelopt"], "onnxruntime": onnxruntime.__version__}
    write_json(folder / REPORT, {"versions": versions, "verification": figures})


def copy_without_model(source: Path, folder: Path) -> None:
    """What an engine's folder holds beside the model and its description, such as the tokenizer, into another."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model*", "engine.json"), dirs_exist_ok=True)


def write_reports(work: Path, pair: Path, plan: PairPlan, text: Calibration) -> None:
    """Complete the `quantization.json` of each quantised engine of a pair, measured beside the float32 pair in `work`.

    In place of a plan is run what its graph was verified as, or the float32 engine if it has no 8-bit products.
    """
    plain, measured = work / PLAIN, pair
    planned = any(spec.plan is not None for _, spec, _ in plan.engines)
    if planned:
        measured = work / "measured"
        shutil.copytree(plain, measured)
        for executed in (work / EXECUTED).iterdir():
            shutil.rmtree(measured / executed.name)
            executed.rename(measured / executed.name)
    for model, spec, _ in plan.engines:
        if spec.precision in MEASURED:
            own = pair / model.name
            found = measure(plain, measured, model.name, text, own if planned else None)
            write_json(own / REPORT, {**read_json(own, REPORT), **found, "precision": spec.precision})
