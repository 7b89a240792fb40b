"""What an export of two checkpoints will write, with its input checked before anything is compiled."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engines.base import KV_PAGE, EngineSpec
from engines.kinds import FORMATS, STATIC
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.find import digest_of, find
from export.checkpoint.vocabulary import describe_vocabularies
from export.options import MEASURED, ExportOptions, Progress
from export.quantization.model_optimizer import optimizer_version
from export.quantization.report import NEUTRAL_TEXT, Calibration, read_calibration


@dataclass(frozen=True)
class PairPlan:
    """What an export will write, its input checked.

    Attributes:
        engines: checkpoint, engine and tokenizer of the target and, unless drafts are looked up, of the auxiliary.
        calibration: text to measure quantised engines on, which are made of a float32 pair; None if there are none.
    """

    engines: tuple[tuple[Checkpoint, EngineSpec, PreTrainedTokenizerBase], ...]
    description: dict[str, object]
    calibration: Calibration | None = None


def plan_pair(options: ExportOptions, progress: Progress = lambda stage: None, weights: bool = True) -> PairPlan:
    """Check all input of `export.pair.export_pair` but the folder.

    Args:
        weights: download the weights of hub ids; without, the hashes of engines made of them are not an export's.
    """
    fields = zip(("precision", "auxiliary_precision"), options.precisions, strict=False)
    optimizers = [{"nvidia-modelopt": optimizer_version(*one)} if one[1] in STATIC else {} for one in fields]
    rows, capacity, format = options.rows, options.capacity, options.format
    progress("checking")
    models = [find("target", options.target, weights, options.revision)]
    if options.auxiliary is not None:
        models.append(find("auxiliary", options.auxiliary, weights, options.auxiliary_revision))
    if capacity is None:
        fewest = min([4096, *(model.positions for model in models if model.positions)])
        capacity = max(2 * KV_PAGE, fewest // KV_PAGE * KV_PAGE)
    specs = []
    for model, own, optimizer in zip(models, options.precisions, optimizers, strict=True):
        spec = model.spec(rows, capacity, own, format)
        spec = replace(spec, attention=options.attention, versions={**spec.versions, **optimizer})
        if FORMATS[format].compiles == "checkpoint":
            from export.tensorrt_llm import build

            spec = replace(spec, plan=build.plan_for(spec, model))
        elif FORMATS[format].stored == "plan":
            from export.tensorrt import plan_for

            spec = replace(spec, plan=plan_for(format, spec, options.compute_capabilities))
        specs.append(spec)
    tokenizers = [model.tokenizer() for model in models]
    specs = [replace(s, eos_token_ids=_ends(s, t)) for s, t in zip(specs, tokenizers, strict=True)]
    vocabularies = describe_vocabularies(tokenizers[0], tokenizers[-1], specs[0].vocab_size, specs[-1].vocab_size)
    if shared := vocabularies.get("shared_tokens"):
        progress(f"{shared} of the target's {vocabularies['vocab_size']} tokens are in both vocabularies")
    readers = dict(zip((model.name for model in models), tokenizers, strict=True))
    text = read_calibration(options.calibration or NEUTRAL_TEXT, readers) if options.measured else None
    specs = [
        replace(s, build_hash=build_hash(s, t, text.sha256 if text and s.precision in MEASURED else ""))
        for s, t in zip(specs, tokenizers, strict=True)
    ]
    description: dict[str, object] = {**vocabularies, "defaults": models[0].defaults(options.defaults)}
    if options.auxiliary is None:
        description["engines"] = ["target"]
    return PairPlan(tuple(zip(models, specs, tokenizers, strict=True)), description, text)


def _ends(spec: EngineSpec, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a text: of the checkpoint's configuration, and its tokenizer's, which an adapter may bring."""
    known, own = spec.eos_token_ids, tokenizer.eos_token_id
    return known if own in known or own not in range(spec.vocab_size) else (*known, own)


@cache
def exporter_version() -> str:
    """Hash of the sources that make engines, so that nobody has to raise a number."""
    root = Path(__file__).parents[1]
    files = [*root.glob("export/**/*.py"), *root.glob("engines/pytorch/*.py"), root / "engines" / "base.py"]
    return digest_of(sorted(files))


def build_hash(spec: EngineSpec, tokenizer: PreTrainedTokenizerBase, calibration: str = "") -> str:
    """Sha256 over all that decides what is in an engine folder; where its checkpoint was does not.

    Args:
        calibration: hash of the text that a quantised engine's report is of.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = digest_of(sorted(path for path in Path(folder).rglob("*") if path.is_file()))
    values = {**asdict(spec), "source": "", "build_hash": ""}
    text = json.dumps([values, files, calibration, exporter_version()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
