"""Two checkpoints in, one pair folder out."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import onnx
import torch
from transformers import PreTrainedTokenizerBase

from engines.base import BLOCK, DTYPES, EngineSpec
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
from export.checkpoint import Checkpoint, find
from export.graph import write_graph
from export.verify import verify
from export.vocabulary import common_vocabulary
from export.weights import filled
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
    dtype: str = "float32",
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
        dtype: `float32` or `float16`, of weights, cache and logits.
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
    if dtype not in DTYPES:
        raise InvalidInput("dtype", dtype, f"choose one of {', '.join(DTYPES)}")
    if format not in FORMATS:
        raise InvalidInput("to", format, f"choose one of {', '.join(FORMATS)}")
    checked = DecodingParams.from_dict(defaults or {})
    progress("checking")
    models = [find("target", target), find("auxiliary", auxiliary)]
    specs = [model.spec(rows, capacity, dtype, format) for model in models]
    tokenizers = [model.tokenizer() for model in models]
    size = common_vocabulary(*tokenizers, *(spec.vocab_size for spec in specs))
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
        for model, spec, tokenizer in zip(models, specs, tokenizers, strict=True):
            _write_engine(temporary / model.name, model, spec, tokenizer, progress)
        write_json(temporary / "pair.json", description)
    return True


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
    engine = open_engine(folder, threads=torch.get_num_threads())
    with filled(checkpoint.empty("float32"), weights, torch.float32) as reference:
        reference.set_attn_implementation("eager")
        verify(engine, reference)


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
