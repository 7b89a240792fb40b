"""Two checkpoints in, one pair folder out."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx
import torch
from transformers import PreTrainedTokenizerBase

from engines.base import BLOCK, PRECISIONS, EngineSpec
from engines.folder import (
    exported_defaults,
    open_engine,
    read_json,
    read_spec,
    vocabulary_hash,
    write_folder,
    write_json,
    write_spec,
)
from engines.onnxruntime_engine import OnnxRuntimeEngine
from export.checkpoint import Checkpoint, find
from export.graph import write_graph
from export.quantization import REPORT, Calibration, compare_pairs, measure, read_calibration, runtime_version
from export.quantize import QUANTIZED, WEIGHT_ONLY, quantize_graph, quantized_weights, write_exact
from export.verify import observe, verify, verify_activations
from export.vocabulary import common_vocabulary
from export.weights import filled, parameter_names
from mtad.errors import InvalidInput
from mtad.params import DecodingParams

log = logging.getLogger(__name__)

FORMATS = ("onnx", "torch")


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
    defaults: dict[str, object] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> bool:
    """Compile two checkpoints and write `folder/target`, `folder/auxiliary` and `folder/pair.json`.

    Everything that can be wrong with the input is checked first. Both engines are compared with their checkpoints
    before the folder takes its name; an interrupted export leaves nothing under it.

    Args:
        folder: the pair folder.
        target, auxiliary: local checkpoint folders or hub ids.
        rows: requests at once, of both engines.
        capacity: KV columns a row, a multiple of 64: prompt, new tokens and one draft tree must fit.
        precision: one of `PRECISIONS`, of the target.
        auxiliary_precision: of the auxiliary; default: the target's.
        calibration: text to measure a quantised pair on, JSON lines with `prompt` and perhaps `answer`; asked for if
            and only if something is quantised.
        format: `onnx` for ONNX Runtime, `torch` for the reference engine.
        defaults: decoding parameters to put into `pair.json`.
        overwrite: replace an existing folder.
        progress: called with the name of each stage as it begins.

    Returns:
        False if the folder was already what this call would write, so that nothing was done.

    Raises:
        InvalidInput: before anything is compiled, or when a model cannot be written as a graph; nothing is left behind.
        VerificationFailed: an engine does not compute what its checkpoint computes; nothing is left behind.
    """
    if rows < 1:
        raise InvalidInput("rows", rows, "give at least 1")
    if capacity < 2 * BLOCK or capacity % BLOCK:
        raise InvalidInput("capacity", capacity, f"give a multiple of {BLOCK}, at least {2 * BLOCK}")
    if format not in FORMATS:
        raise InvalidInput("to", format, f"choose one of {', '.join(FORMATS)}")
    precisions = precision, auxiliary_precision or precision
    for field, value in zip(("precision", "auxiliary_precision"), precisions, strict=True):
        _check_precision(field, value, format)
    quantized = any(value in QUANTIZED for value in precisions)
    if quantized != (calibration is not None):
        problem = "give text that such a pair will meet: how far a quantised engine is off depends on it"
        raise InvalidInput("calibration", calibration, problem if quantized else "nothing is quantised; leave it out")
    checked = DecodingParams.from_dict(defaults or {})
    progress("checking")
    models = [find("target", target), find("auxiliary", auxiliary)]
    specs = [model.spec(rows, capacity, own, format) for model, own in zip(models, precisions, strict=True)]
    tokenizers = [model.tokenizer() for model in models]
    size = common_vocabulary(*tokenizers, *(spec.vocab_size for spec in specs))
    text = None if calibration is None else read_calibration(calibration, tokenizers[0])
    description = {
        "vocab_size": size,
        "vocabulary_hash": vocabulary_hash(tokenizers[0].get_vocab()),
        "defaults": {k: v for k, v in asdict(checked).items() if k in (defaults or {})},
    }
    folder = folder.absolute()
    if folder.exists():
        if _same(folder, specs, description):
            return False
        if not (folder / "pair.json").is_file():
            raise InvalidInput("pair", str(folder), "exists and was not written by mtad-export; give another name")
        tuned = _is_tuned(folder)
        if not overwrite:
            loss = " (its tuning is lost then)" if tuned else ""
            problem = f"exists and holds something else; give another name or --overwrite{loss}"
            raise InvalidInput("pair", str(folder), problem)
        if tuned:
            log.warning("%s was tuned, for what it held before: run mtad-tune again", folder)
    with write_folder(folder) as temporary:
        plain = temporary if text is None else temporary / "float32"
        plain.mkdir(exist_ok=True)
        for model, spec, tokenizer in zip(models, specs, tokenizers, strict=True):
            own = spec if text is None else replace(spec, precision="float32", dtype="float32")
            _write_engine(plain / model.name, model, own, tokenizer, progress)
        write_json(plain / "pair.json", description)
        if text is not None:
            for model, spec, tokenizer in zip(models, specs, tokenizers, strict=True):
                source, engine = plain / model.name, temporary / model.name
                if spec.precision in QUANTIZED:
                    _quantize_engine(source, engine, model, spec, progress)
                elif spec.precision == "float32":
                    shutil.copytree(source, engine)
                else:
                    _write_engine(engine, model, spec, tokenizer, progress)
            write_json(temporary / "pair.json", description)
            _report(plain, temporary, specs, text, progress)
            shutil.rmtree(plain)
    return True


def _check_precision(field: str, precision: str, format: str) -> None:
    if precision not in PRECISIONS:
        raise InvalidInput(field, precision, f"choose one of {', '.join(PRECISIONS)}")
    if precision in QUANTIZED and format != "onnx":
        raise InvalidInput(field, precision, f"is for ONNX Runtime (--to onnx), not for {format}")


def _quantize_engine(
    source: Path, folder: Path, checkpoint: Checkpoint, spec: EngineSpec, progress: Callable[[str], None]
) -> None:
    """Write a quantised copy of the float32 engine at `source`, and check it.

    Two steps, so that neither tolerance hides the other's error: computed in float32, the quantised graph has to be the
    checkpoint with the same quantised weights; as it will run, with quantised activations, it has to be near that.
    """
    progress(f"{checkpoint.name}: quantise")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.onnx*"))
    empty, threads = checkpoint.empty("float32"), torch.get_num_threads()
    names = {name for several in parameter_names(empty).values() for name in several}
    quantize_graph(source / "model.onnx", folder / "model.onnx", spec.precision, names)
    write_spec(folder, spec)
    progress(f"{checkpoint.name}: verify")
    weights = quantized_weights(folder / "model.onnx", checkpoint.weights(), empty)
    found: dict[str, Any] = {"versions": {"onnxruntime": runtime_version()}}
    with filled(empty, weights, torch.float32) as reference:
        reference.set_attn_implementation("eager")
        if spec.precision in WEIGHT_ONLY:
            exact = folder / "exact.onnx"
            write_exact(folder / "model.onnx", exact)
            observed = observe(OnnxRuntimeEngine(folder, spec, threads, exact.name), empty)
            found["computed_in_float32"] = verify(observed, reference)
            exact.unlink()
        found["activations"] = verify_activations(observe(open_engine(folder, threads), empty), reference)
    write_json(folder / REPORT, found)


def _report(
    plain: Path, folder: Path, specs: list[EngineSpec], text: Calibration, progress: Callable[[str], None]
) -> None:
    """Complete the `quantization.json` of each quantised engine."""
    progress("measuring")
    pairs = compare_pairs(plain, folder, text)
    for name, spec in zip(("target", "auxiliary"), specs, strict=True):
        if spec.precision in QUANTIZED:
            checked = read_json(folder / name, REPORT)
            versions = checked.pop("versions")
            figures = measure(plain, folder, name, text)
            block = {"precisions": [own.precision for own in specs], **pairs}
            values = {"versions": versions, **figures, "verification": checked, "block_efficiency": block}
            write_json(folder / name / REPORT, values)


def _write_engine(
    folder: Path,
    checkpoint: Checkpoint,
    spec: EngineSpec,
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[str], None],
) -> None:
    folder.mkdir()
    progress(f"{checkpoint.name}: export")
    weights = checkpoint.weights()
    if spec.format == "onnx":
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
    write_spec(folder, spec)
    progress(f"{checkpoint.name}: verify")
    empty = checkpoint.empty("float32")
    observed = observe(open_engine(folder, threads=torch.get_num_threads()), empty)  # and closed, to make room
    with filled(empty, weights, torch.float32) as reference:
        reference.set_attn_implementation("eager")
        verify(observed, reference)


def _same(folder: Path, specs: list[EngineSpec], description: dict[str, object]) -> bool:
    """Whether `folder` is what an export with these engines and this description would write."""
    try:
        written = [read_spec(folder / name) for name in ("target", "auxiliary")]
        found = read_json(folder, "pair.json")
        found["defaults"] = exported_defaults(found)  # tuned since or not: it is the same export
        found.pop("tuning", None)
        return written == specs and found == json.loads(json.dumps(description))
    except (InvalidInput, OSError):
        return False


def _is_tuned(folder: Path) -> bool:
    try:
        return "tuning" in read_json(folder, "pair.json")
    except InvalidInput:
        return False
