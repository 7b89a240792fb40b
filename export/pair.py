"""Two checkpoints in, one pair folder out."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import torch
from transformers import PreTrainedTokenizerBase

from engines.base import BLOCK, PRECISIONS, EngineSpec
from engines.folder import (
    ATTENTION,
    exported_defaults,
    open_model,
    read_json,
    read_spec,
    vocabulary_hash,
    write_json,
    write_spec,
)
from engines.onnxruntime_engine import OnnxRuntimeEngine
from engines.plan import RUNTIMES, current_gpu
from export.build import build_hash
from export.checkpoint import Checkpoint, find
from export.graph import write_graph
from export.quantization import REPORT, Calibration, compare_pairs, measure, read_calibration, runtime_version
from export.quantize import QUANTIZED, WEIGHT_ONLY, quantize_graph, quantized_weights, write_exact
from export.unfinished import Workplace, workplace
from export.verify import observe, verify, verify_activations
from export.vocabulary import common_vocabulary
from export.weights import filled, parameter_names
from mtad.errors import InvalidInput
from mtad.params import DecodingParams

log = logging.getLogger(__name__)

FORMATS = ("onnx", "torch", *RUNTIMES)
PLAIN = "float32"
"""Folder of the float32 pair that quantised engines are made of, while they are made."""


def export_pair(
    folder: Path,
    target: str,
    auxiliary: str,
    *,
    rows: int = 8,
    capacity: int = 1024,
    precision: str = "float32",
    auxiliary_precision: str | None = None,
    calibration: Path | None = None,
    format: str = "onnx",
    attention: str = "operator",
    compute_capabilities: Sequence[str] = (),
    defaults: dict[str, object] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> bool:
    """Compile two checkpoints and write `folder/target`, `folder/auxiliary` and `folder/pair.json`.

    Everything that can be wrong with the input is checked first. Both engines are compared with their checkpoints
    before the folder takes its name; an interrupted export leaves nothing under it. An engine is built only if its hash
    (`export.build`) is not that of one in the folder, nor of one that an interrupted export has finished.

    Args:
        folder: the pair folder.
        target, auxiliary: local checkpoint folders or hub ids.
        rows: requests at once, of both engines.
        capacity: KV columns a row, a multiple of 64: prompt, new tokens and one draft tree must fit.
        precision: one of `PRECISIONS`, of the target.
        auxiliary_precision: of the auxiliary; default: the target's.
        calibration: text to measure a quantised pair on, JSON lines with `prompt` and perhaps `answer`; asked for if
            and only if something is quantised.
        format: `onnx` for ONNX Runtime, `torch` for the reference engine, `tensorrt` for the GPU of this machine,
            `tensorrt-rtx` for GPUs of the compute capabilities given.
        attention: `operator`, or `decomposed` for runtimes that do not know the operators of opset 24.
        compute_capabilities: of `tensorrt-rtx`, such as `8.6`; default: all that it knows.
        defaults: decoding parameters to put into `pair.json`.
        overwrite: replace an existing folder.
        progress: called with the name of each stage as it begins.

    Returns:
        False if the folder was already what this call would write, so that nothing was done.

    Raises:
        InvalidInput: before anything is compiled, or when a model cannot be written as a graph; nothing is left behind.
        VerificationFailed: an engine does not compute what its checkpoint computes; nothing is left behind.
    """
    plan = plan_pair(
        target,
        auxiliary,
        rows,
        capacity,
        precision,
        format,
        defaults,
        progress,
        auxiliary_precision=auxiliary_precision,
        calibration=calibration,
        attention=attention,
        compute_capabilities=compute_capabilities,
    )
    folder = folder.absolute()
    if not check_folder(folder, plan, overwrite):
        return False
    wanted = {model.name: spec.build_hash for model, spec, _ in plan.engines}
    with workplace(folder, wanted) as work:
        new = [
            m.name for m, spec, _ in plan.engines if not work.finished(m.name) and engine_differs(folder / m.name, spec)
        ]
        if plan.calibration is not None and new:
            _write_plain(work.path / PLAIN, plan, progress)
        for model, spec, tokenizer in plan.engines:
            if work.finished(model.name):
                progress(f"{model.name}: finished before")
            elif model.name not in new:
                progress(f"{model.name}: unchanged")
                work.take(model.name, folder / model.name, spec)
            else:
                if spec.precision in QUANTIZED:
                    _quantize_engine(work.path / PLAIN / model.name, work.begin(model.name), model, spec, progress)
                else:
                    _write_engine(work.begin(model.name), model, spec, tokenizer, progress)
                work.finish(model.name, spec)
        if plan.calibration is not None and new:
            progress("measuring")
            _report(work, plan, plan.calibration)
        work.publish(folder, list(wanted), plan.description)
    return True


@dataclass(frozen=True)
class Plan:
    """What an export will write, its input checked.

    Attributes:
        engines: checkpoint, engine and tokenizer of the target and of the auxiliary.
        description: content of `pair.json`.
        calibration: text to measure quantised engines on; None if there are none.
    """

    engines: tuple[tuple[Checkpoint, EngineSpec, PreTrainedTokenizerBase], ...]
    description: dict[str, object]
    calibration: Calibration | None = None


def plan_pair(
    target: str,
    auxiliary: str,
    rows: int,
    capacity: int,
    precision: str,
    format: str,
    defaults: dict[str, object] | None,
    progress: Callable[[str], None] = lambda stage: None,
    weights: bool = True,
    auxiliary_precision: str | None = None,
    calibration: Path | None = None,
    attention: str = "operator",
    compute_capabilities: Sequence[str] = (),
) -> Plan:
    """Check all input of `export_pair` but the folder.

    Args:
        weights: download the weights of hub ids; without, the hashes of engines made of them are not an export's.

    Raises:
        InvalidInput: something is wrong with it.
    """
    if rows < 1:
        raise InvalidInput("rows", rows, "give at least 1")
    if capacity < 2 * BLOCK or capacity % BLOCK:
        raise InvalidInput("capacity", capacity, f"give a multiple of {BLOCK}, at least {2 * BLOCK}")
    if format not in FORMATS:
        raise InvalidInput("to", format, f"choose one of {', '.join(FORMATS)}")
    precisions = precision, auxiliary_precision or precision
    for field, value in zip(("precision", "auxiliary_precision"), precisions, strict=True):
        _check_precision(field, value, format, attention)
    quantized = any(value in QUANTIZED for value in precisions)
    if quantized != (calibration is not None):
        problem = "give text that such a pair will meet: how far a quantised engine is off depends on it"
        raise InvalidInput(
            "calibration",
            calibration and str(calibration),
            problem if quantized else "nothing is quantised; leave it out",
        )
    if attention not in ATTENTION or (format == "torch" and attention != ATTENTION[0]):
        raise InvalidInput("attention", attention, f"choose one of {', '.join(ATTENTION)}; torch has the first alone")
    if compute_capabilities and format not in RUNTIMES:
        raise InvalidInput("compute-capability", " ".join(compute_capabilities), "only for --to tensorrt-rtx")
    checked = DecodingParams.from_dict(defaults or {})
    progress("checking")
    models = [find("target", target, weights), find("auxiliary", auxiliary, weights)]
    specs = [
        replace(model.spec(rows, capacity, own, format), attention=attention)
        for model, own in zip(models, precisions, strict=True)
    ]
    if format in RUNTIMES:
        from export.tensorrt import plan_for

        specs = [replace(spec, plan=plan_for(format, spec, compute_capabilities)) for spec in specs]
    tokenizers = [model.tokenizer() for model in models]
    size = common_vocabulary(*tokenizers, *(spec.vocab_size for spec in specs))
    text = None if calibration is None else read_calibration(calibration, tokenizers[0])
    specs = [
        replace(s, build_hash=build_hash(s, t, text.sha256 if text and s.precision in QUANTIZED else ""))
        for s, t in zip(specs, tokenizers, strict=True)
    ]
    description: dict[str, object] = {
        "vocab_size": size,
        "vocabulary_hash": vocabulary_hash(tokenizers[0].get_vocab()),
        "defaults": {k: v for k, v in asdict(checked).items() if k in (defaults or {})},
    }
    return Plan(tuple(zip(models, specs, tokenizers, strict=True)), description, text)


def _check_precision(field: str, precision: str, format: str, attention: str) -> None:
    if precision not in PRECISIONS:
        raise InvalidInput(field, precision, f"choose one of {', '.join(PRECISIONS)}")
    if precision in QUANTIZED and (format, attention) != ("onnx", ATTENTION[0]):
        raise InvalidInput(
            field, precision, f"is for ONNX Runtime (--to onnx), not for {format}, {attention} attention"
        )


def check_folder(folder: Path, plan: Plan, overwrite: bool) -> bool:
    """Whether there is anything to write.

    Raises:
        InvalidInput: the folder holds something that may not be replaced.
    """
    if not folder.exists():
        return True
    different = _differences(folder, plan)
    if not different:
        return False
    if not (folder / "pair.json").is_file():
        raise InvalidInput("pair", str(folder), "exists and was not written by mtad-export; give another name")
    tuned = _is_tuned(folder)
    if not overwrite:
        loss = " (its tuning is lost then)" if tuned else ""
        problem = f"exists and holds something else ({different}); give another name or --overwrite{loss}"
        raise InvalidInput("pair", str(folder), problem)
    if tuned:
        log.warning("%s was tuned, for what it held before: run mtad-tune again", folder)
    return True


def _write_engine(
    folder: Path,
    checkpoint: Checkpoint,
    spec: EngineSpec,
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[str], None],
) -> None:
    """An engine into an empty folder, all but its `engine.json`: nothing opens it before it is verified."""
    progress(f"{checkpoint.name}: export")
    weights = checkpoint.weights()
    if spec.format != "torch":
        try:
            write_graph(checkpoint.empty(spec.dtype), weights, spec, folder / "model.onnx")
        except (
            torch.onnx.OnnxExporterError,
            onnx.checker.ValidationError,
            onnx.shape_inference.InferenceError,
        ) as error:
            problem = f"{spec.architecture} cannot be written as an ONNX graph: {error}"
            raise InvalidInput(checkpoint.name, str(checkpoint.folder), problem) from error
    else:
        checkpoint.load(spec.dtype).save_pretrained(folder, max_shard_size=2**63)
    tokenizer.save_pretrained(folder)
    progress(f"{checkpoint.name}: verify")
    written = spec if spec.plan is None else replace(spec, format="onnx", plan=None)  # what a plan is then built from
    empty = checkpoint.empty("float32")
    observed = observe(open_model(folder, written, torch.get_num_threads()), empty)  # and closed, to make room
    with filled(empty, weights, torch.float32) as reference:
        reference.set_attn_implementation("eager")
        verify(observed, reference)
    if spec.plan is None:
        return
    from export.tensorrt import build_plan, runs_here

    progress(f"{checkpoint.name}: build")
    build_plan(folder / "model.onnx", spec, folder / "model.engine")
    for file in [folder / "model.onnx", *folder.glob("model*.data")]:
        file.unlink()
    if runs_here(spec.plan, current_gpu()):
        observed = observe(open_model(folder, spec), empty)
        with filled(empty, weights, torch.float32) as reference:
            verify(observed, reference)
    else:
        log.warning("the %s's plan was built but not run, for want of its GPU; its graph was verified", checkpoint.name)


def _write_plain(folder: Path, plan: Plan, progress: Callable[[str], None]) -> None:
    """The pair in float32, which quantised engines are made of and compared with."""
    folder.mkdir()
    for checkpoint, spec, tokenizer in plan.engines:
        own = replace(spec, precision="float32", dtype="float32", build_hash="")
        (folder / checkpoint.name).mkdir()
        _write_engine(folder / checkpoint.name, checkpoint, own, tokenizer, progress)
        write_spec(folder / checkpoint.name, own)
    write_json(folder / "pair.json", plan.description)


def _quantize_engine(
    source: Path, folder: Path, checkpoint: Checkpoint, spec: EngineSpec, progress: Callable[[str], None]
) -> None:
    """A quantised copy of the float32 engine at `source`, checked, into an empty folder, all but its `engine.json`.

    Two steps, so that neither tolerance hides the other's error: computed in float32, the quantised graph has to be the
    checkpoint with the same quantised weights; as it will run, with quantised activations, it has to be near that.
    """
    progress(f"{checkpoint.name}: quantise")
    ignored = shutil.ignore_patterns("model*", "engine.json")
    shutil.copytree(source, folder, ignore=ignored, dirs_exist_ok=True)
    empty, threads = checkpoint.empty("float32"), torch.get_num_threads()
    names = {name for several in parameter_names(empty).values() for name in several}
    quantize_graph(source / "model.onnx", folder / "model.onnx", spec.precision, names)
    progress(f"{checkpoint.name}: verify")
    weights = quantized_weights(folder / "model.onnx", checkpoint.weights(), empty)
    found: dict[str, Any] = {}
    with filled(empty, weights, torch.float32) as reference:
        reference.set_attn_implementation("eager")
        if spec.precision in WEIGHT_ONLY:
            exact = folder / "exact.onnx"
            write_exact(folder / "model.onnx", exact)
            observed = observe(OnnxRuntimeEngine(folder, spec, threads, exact.name), empty)
            found["computed_in_float32"] = verify(observed, reference)
            exact.unlink()
        found["activations"] = verify_activations(observe(open_model(folder, spec, threads), empty), reference)
    write_json(folder / REPORT, {"versions": {"onnxruntime": runtime_version()}, "verification": found})


def _report(work: Workplace, plan: Plan, text: Calibration) -> None:
    """Complete the `quantization.json` of each quantised engine, measured beside the float32 pair."""
    plain, trial = work.path / PLAIN, work.path / "trial"
    work.copy(trial, [model.name for model, _, _ in plan.engines], plan.description)
    pairs = compare_pairs(plain, trial, text)
    for model, spec, _ in plan.engines:
        if spec.precision in QUANTIZED:
            report = work.path / model.name / REPORT
            checked = {k: v for k, v in read_json(report.parent, REPORT).items() if k in ("versions", "verification")}
            block = {"precisions": [own.precision for _, own, _ in plan.engines], **pairs}
            write_json(report, {**checked, **measure(plain, trial, model.name, text), "block_efficiency": block})


def _differences(folder: Path, plan: Plan) -> str:
    """What an export would change in `folder`, in words; empty if nothing."""
    found = {model.name: engine_differs(folder / model.name, spec) for model, spec, _ in plan.engines}
    try:
        pair = read_json(folder, "pair.json")
        pair["defaults"] = exported_defaults(pair)  # tuned since or not: it is the same export
        pair.pop("tuning", None)
        same = pair == json.loads(json.dumps(plan.description))
        found["pair.json"] = [] if same else sorted(k for k in plan.description if pair.get(k) != plan.description[k])
    except InvalidInput:
        found["pair.json"] = ["damaged"]
    return "; ".join(f"{name}: {', '.join(fields)}" for name, fields in found.items() if fields)


def engine_differs(folder: Path, spec: EngineSpec) -> list[str]:
    """What is not as in the engine of `folder`; its source does not count."""
    try:
        there, wanted = asdict(read_spec(folder)), asdict(spec)
    except InvalidInput:
        return ["missing or damaged"]
    different = [name for name in wanted if name != "source" and there[name] != wanted[name]]
    if different == ["build_hash"]:
        return ["exporter, tokenizer or calibration text" if spec.precision in QUANTIZED else "exporter or tokenizer"]
    return [name for name in different if name != "build_hash"]


def _is_tuned(folder: Path) -> bool:
    try:
        return "tuning" in read_json(folder, "pair.json")
    except InvalidInput:
        return False
