"""One checkpoint to the plan of an engine with static 8-bit products, verified, and to what measures it on a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnxruntime
import torch

from engines.base import EngineSpec
from engines.folder import open_model, write_json, write_spec
from engines.placement import Placement
from export.checkpoint.checkpoint import Checkpoint
from export.engine import build, copy_without_model, expectation, trace
from export.onnx.widen import rounded, write_widened
from export.quantization.model_optimizer import calibrate, optimizer_version
from export.quantization.qdq import product_names, write_quantized
from export.quantization.report import REPORT
from export.quantization.weight_only import quantized_weights
from export.verification.verify import WIDENED, verify, verify_activations


def write_static_engine(
    source: Path,
    folder: Path,
    executed: Path,
    checkpoint: Checkpoint,
    spec: EngineSpec,
    texts: Sequence[Sequence[int]],
    progress: Callable[[str], None],
) -> None:
    """A plan with 8-bit products into an empty folder, all but its `engine.json`.

    Verified in two steps, as other quantised engines are, on the very graph that the plan is built from, widened to
    float32: without the quantisation of activations it has to be the checkpoint with the same quantised weights; with
    it, it has to be near that. A plan whose GPU is here is compared as well.

    Args:
        source: the float32 engine of the checkpoint.
        folder: where the plan is written.
        executed: folder for an engine of the graph with all of its quantisation, in float32, for ONNX Runtime.
        texts: token ids to find ranges on.
    """
    progress(f"{checkpoint.name}: quantise")
    for copy in (folder, executed):
        copy_without_model(source, copy)
    weights, empty = rounded(checkpoint.weights(), spec.torch_dtype), checkpoint.empty("float32")
    names = set(dict(empty.named_parameters(remove_duplicate=False)))
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        own = Path(temporary)
        products = product_names(source / "model.onnx", own / "products.onnx", names)
        found = calibrate(own / "products.onnx", own, spec, products, texts)
        trace(checkpoint, weights, spec, own / "half.onnx")
        write_quantized(own / "half.onnx", folder / "model.onnx", spec.precision, names, found)
    progress(f"{checkpoint.name}: verify")
    wide = replace(spec, format="onnx", dtype="float32", precision="float32", plan=None)
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
        figures["plan"] = verify_activations(open_model(folder, spec), expected)
    versions = {"nvidia-modelopt": optimizer_version(), "onnxruntime": onnxruntime.__version__}
    write_json(folder / REPORT, {"versions": versions, "verification": figures})
