"""What an export of two checkpoints will write, with its input checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engines.base import KV_PAGE, PRECISIONS, EngineSpec
from engines.folder import ATTENTION, vocabulary_hash
from engines.tensorrt_plan import RUNTIMES
from export.build_hash import build_hash
from export.checkpoint.checkpoint import Checkpoint, find
from export.checkpoint.vocabulary import common_vocabulary
from export.quantization.model_optimizer import check_installed, optimizer_version
from export.quantization.qdq import STATIC
from export.quantization.report import Calibration, read_calibration
from export.quantization.weight_only import QUANTIZED
from mtad.errors import InvalidInput
from mtad.params import DecodingParams

FORMATS = ("onnx", "torch", *RUNTIMES)
MEASURED = (*QUANTIZED, *STATIC)
"""Precisions that are measured on text."""


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and as what.

    Attributes:
        target, auxiliary: local checkpoint folders or hub ids.
        revision, auxiliary_revision: branch, tag or commit of a hub id; by default, its main branch.
        rows: requests at once, of both engines.
        capacity: KV columns per row, a multiple of 64: prompt, new tokens and one draft tree must fit. By default 1024,
            or as many as both models have positions for.
        precision: one of `PRECISIONS`, of the target. By default float32, and float16 for TensorRT, whose oldest GPUs
            take nothing else.
        auxiliary_precision: of the auxiliary; default: the target's.
        calibration: text to measure a quantised pair on, JSON lines with `prompt` and perhaps `answer`; asked for if
            and only if something is quantised.
        format: `onnx` for ONNX Runtime, `torch` for the reference engine, `tensorrt` for the GPU of this machine,
            `tensorrt-rtx` for GPUs of the compute capabilities given.
        attention: `operator`, or `decomposed` for runtimes that do not know the operators of opset 24.
        compute_capabilities: of `tensorrt-rtx`, such as `8.6`; default: all that it knows.
        defaults: decoding parameters to put into `pair.json`.
    """

    target: str
    auxiliary: str
    _: KW_ONLY
    revision: str | None = None
    auxiliary_revision: str | None = None
    rows: int = 8
    capacity: int | None = None
    precision: str | None = None
    auxiliary_precision: str | None = None
    calibration: Path | None = None
    format: str = "onnx"
    attention: str = "operator"
    compute_capabilities: Sequence[str] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class PairPlan:
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
    options: ExportOptions, progress: Callable[[str], None] = lambda stage: None, weights: bool = True
) -> PairPlan:
    """Check all input of `export.pair.export_pair` but the folder.

    Args:
        weights: download the weights of hub ids; without, the hashes of engines made of them are not an export's.

    Raises:
        InvalidInput: something is wrong with it.
    """
    rows, format, attention = options.rows, options.format, options.attention
    calibration, capabilities = options.calibration, options.compute_capabilities
    if rows < 1:
        raise InvalidInput("rows", rows, "give at least 1")
    capacity = options.capacity
    if capacity is not None and (capacity < 2 * KV_PAGE or capacity % KV_PAGE):
        raise InvalidInput("capacity", capacity, f"give a multiple of {KV_PAGE}, at least {2 * KV_PAGE}")
    if format not in FORMATS:
        raise InvalidInput("to", format, f"choose one of {', '.join(FORMATS)}")
    precision = options.precision or ("float16" if format in RUNTIMES else "float32")
    precisions = precision, options.auxiliary_precision or precision
    for name, value in zip(("precision", "auxiliary_precision"), precisions, strict=True):
        _check_precision(name, value, format, attention)
    quantized = any(value in MEASURED for value in precisions)
    if quantized != (calibration is not None):
        problem = "give text like that in production: the error of a quantized engine depends on it"
        raise InvalidInput(
            "calibration",
            calibration and str(calibration),
            problem if quantized else "nothing is quantized; leave it out",
        )
    if attention not in ATTENTION or (format == "torch" and attention != ATTENTION[0]):
        raise InvalidInput("attention", attention, f"choose one of {', '.join(ATTENTION)}; torch has only the first")
    if capabilities and format not in RUNTIMES:
        raise InvalidInput("compute-capability", " ".join(capabilities), "only for --to tensorrt-rtx")
    checked = DecodingParams.from_dict(dict(options.defaults))
    progress("checking")
    models = [
        find("target", options.target, weights, options.revision),
        find("auxiliary", options.auxiliary, weights, options.auxiliary_revision),
    ]
    if capacity is None:
        fewest = min([1024, *(model.positions for model in models if model.positions)])
        capacity = max(2 * KV_PAGE, fewest // KV_PAGE * KV_PAGE)
    specs = [
        replace(model.spec(rows, capacity, own, format), attention=attention)
        for model, own in zip(models, precisions, strict=True)
    ]
    specs = [
        replace(s, versions={**s.versions, "nvidia-modelopt": optimizer_version()}) if s.precision in STATIC else s
        for s in specs
    ]
    if format in RUNTIMES:
        from export.tensorrt import plan_for

        specs = [replace(spec, plan=plan_for(format, spec, capabilities)) for spec in specs]
    tokenizers = [model.tokenizer() for model in models]
    size = common_vocabulary(*tokenizers, *(spec.vocab_size for spec in specs))
    text = None if calibration is None else read_calibration(calibration, tokenizers[0])
    specs = [
        replace(s, build_hash=build_hash(s, t, text.sha256 if text and s.precision in MEASURED else ""))
        for s, t in zip(specs, tokenizers, strict=True)
    ]
    description: dict[str, object] = {
        "vocab_size": size,
        "vocabulary_hash": vocabulary_hash(tokenizers[0].get_vocab()),
        "defaults": {k: v for k, v in asdict(checked).items() if k in options.defaults},
    }
    return PairPlan(tuple(zip(models, specs, tokenizers, strict=True)), description, text)


def _check_precision(field: str, precision: str, format: str, attention: str) -> None:
    if precision not in PRECISIONS:
        raise InvalidInput(field, precision, f"choose one of {', '.join(PRECISIONS)}")
    if precision in QUANTIZED and (format, attention) != ("onnx", ATTENTION[0]):
        raise InvalidInput(field, precision, f"needs --to onnx and operator attention, not {format} and {attention}")
    if precision in STATIC:
        if format not in RUNTIMES or attention != ATTENTION[0]:
            problem = f"is for TensorRT (--to {' or '.join(RUNTIMES)}), not for {format}, {attention} attention"
            raise InvalidInput(field, precision, problem)
        check_installed(field, precision)
