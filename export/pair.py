"""Two checkpoints in, one pair folder out."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import onnx
import torch
from transformers import PreTrainedTokenizerBase

from engines.base import BLOCK, DTYPES, EngineSpec
from engines.folder import (
    ATTENTION,
    MODEL_FILES,
    exported_defaults,
    open_model,
    read_json,
    read_spec,
    vocabulary_hash,
)
from engines.plan import RUNTIMES, current_gpu
from export.build import build_hash
from export.checkpoint import Checkpoint, find
from export.graph import write_graph
from export.unfinished import workplace
from export.verify import observe, verify
from export.vocabulary import common_vocabulary
from mtad.errors import InvalidInput
from mtad.params import DecodingParams

log = logging.getLogger(__name__)

FORMATS = ("onnx", "torch", *RUNTIMES)


def export_pair(
    folder: Path,
    target: str,
    auxiliary: str,
    *,
    rows: int = 8,
    capacity: int = 1024,
    dtype: str = "float32",
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
        dtype: `float32` or `float16`, of weights, cache and logits.
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
        dtype,
        format,
        defaults,
        progress,
        attention=attention,
        compute_capabilities=compute_capabilities,
    )
    folder = folder.absolute()
    if not check_folder(folder, plan, overwrite):
        return False
    wanted = {model.name: spec.build_hash for model, spec, _ in plan.engines}
    with workplace(folder, wanted) as work:
        for model, spec, tokenizer in plan.engines:
            if work.finished(model.name):
                progress(f"{model.name}: finished before")
            elif engine_differs(folder / model.name, spec):
                _write_engine(work.begin(model.name), model, spec, tokenizer, progress)
                work.finish(model.name, spec)
            else:
                progress(f"{model.name}: unchanged")
                work.take(model.name, folder / model.name, spec)
        work.publish(folder, list(wanted), plan.description)
    return True


@dataclass(frozen=True)
class Plan:
    """What an export will write, its input checked.

    Attributes:
        engines: checkpoint, engine and tokenizer of the target and of the auxiliary.
        description: content of `pair.json`.
    """

    engines: tuple[tuple[Checkpoint, EngineSpec, PreTrainedTokenizerBase], ...]
    description: dict[str, object]


def plan_pair(
    target: str,
    auxiliary: str,
    rows: int,
    capacity: int,
    dtype: str,
    format: str,
    defaults: dict[str, object] | None,
    progress: Callable[[str], None] = lambda stage: None,
    weights: bool = True,
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
    if dtype not in DTYPES:
        raise InvalidInput("dtype", dtype, f"choose one of {', '.join(DTYPES)}")
    if format not in FORMATS:
        raise InvalidInput("to", format, f"choose one of {', '.join(FORMATS)}")
    if attention not in ATTENTION or (format == "torch" and attention != ATTENTION[0]):
        raise InvalidInput("attention", attention, f"choose one of {', '.join(ATTENTION)}; torch has the first alone")
    if compute_capabilities and format not in RUNTIMES:
        raise InvalidInput("compute-capability", " ".join(compute_capabilities), "only for --to tensorrt-rtx")
    checked = DecodingParams.from_dict(defaults or {})
    progress("checking")
    models = [find("target", target, weights), find("auxiliary", auxiliary, weights)]
    specs = [replace(model.spec(rows, capacity, dtype, format), attention=attention) for model in models]
    if format in RUNTIMES:
        from export.tensorrt import plan_for

        specs = [replace(spec, plan=plan_for(format, spec, compute_capabilities)) for spec in specs]
    tokenizers = [model.tokenizer() for model in models]
    size = common_vocabulary(*tokenizers, *(spec.vocab_size for spec in specs))
    specs = [replace(s, build_hash=build_hash(s, t)) for s, t in zip(specs, tokenizers, strict=True)]
    description: dict[str, object] = {
        "vocab_size": size,
        "vocabulary_hash": vocabulary_hash(tokenizers[0].get_vocab()),
        "defaults": {k: v for k, v in asdict(checked).items() if k in (defaults or {})},
    }
    return Plan(tuple(zip(models, specs, tokenizers, strict=True)), description)


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
    model = checkpoint.load(spec.dtype)
    progress(f"{checkpoint.name}: export")
    if spec.format != "torch":
        try:
            write_graph(model, spec, folder / "model.onnx")
        except (
            torch.onnx.OnnxExporterError,
            onnx.checker.ValidationError,
            onnx.shape_inference.InferenceError,
        ) as error:
            problem = f"{spec.architecture} cannot be written as an ONNX graph: {error}"
            raise InvalidInput(checkpoint.name, str(checkpoint.folder), problem) from error
    else:
        model.save_pretrained(folder, max_shard_size=2**63)
    tokenizer.save_pretrained(folder)
    progress(f"{checkpoint.name}: verify")
    written = spec if spec.plan is None else replace(spec, format="onnx", plan=None)  # what a plan is then built from
    observed = observe(open_model(folder, written, torch.get_num_threads()), model)  # and closed, to make room
    reference = model if spec.dtype == "float32" else checkpoint.load("float32")
    reference.set_attn_implementation("eager")
    verify(observed, reference)
    if spec.plan is None:
        return
    from export.tensorrt import build_plan, runs_here

    progress(f"{checkpoint.name}: build")
    build_plan(folder / "model.onnx", spec, folder / "model.engine")
    for file in MODEL_FILES["onnx"]:
        (folder / file).unlink()
    if runs_here(spec.plan, current_gpu()):
        verify(observe(open_model(folder, spec), model), reference)
    else:
        log.warning("the %s's plan was built but not run, for want of its GPU; its graph was verified", checkpoint.name)


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
        return ["exporter or tokenizer"]
    return [name for name in different if name != "build_hash"]


def _is_tuned(folder: Path) -> bool:
    try:
        return "tuning" in read_json(folder, "pair.json")
    except InvalidInput:
        return False
