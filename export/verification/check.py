"""Does an engine compute what its checkpoint computes, or what another engine does; and if not, where does it begin?

The batches, references and tolerances are those of `export/verification/verify.py`. Layer by layer, outputs of modules
are compared relative to the largest value of the reference, in the order in which the engine computes them: the first
one that differs is where to look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engines.base import EngineSpec
from engines.folder import open_engine, read_spec
from engines.placement import Placement
from engines.pytorch.engine import TorchEngine
from export.checkpoint.checkpoint import Checkpoint, find
from export.quantization.report import REPORT
from export.verification.layers import GraphLocation, MarkedGraph, checkpoint_layers, torch_layers
from export.verification.verify import (
    ACTIVATIONS,
    TOLERANCE,
    Case,
    make_cases,
    run_checkpoint,
    run_engine,
    sliding_window,
)
from mtad.errors import InvalidInput

LAYER_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.16}
"""Largest difference accepted of what a module gives, as a share of its largest value, by engine dtype."""
ROWS = 3
"""Cache rows a check opens an engine with, all that `make_cases` uses."""

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Output:
    """One output, compared over all cases.

    Attributes:
        name: `logits`, or the module's path in the checkpoint.
        place: where the engine's graph writes it, if it has one.
        largest: largest absolute value of the reference.
        allowed: largest absolute difference that is accepted.
    """

    name: str
    place: GraphLocation | None
    error: float
    mean_error: float
    largest: float
    allowed: float
    same: bool


@dataclass(frozen=True)
class Check:
    """An engine beside a reference.

    Attributes:
        layer_tolerance: accepted difference of a module's output, as a share of its largest value; None: not compared.
        argmax_agreement: share of compared positions with the same likeliest token.
        outputs: in the order in which the engine computes them; `logits` last.
    """

    engine: str
    reference: str
    tolerance: float
    layer_tolerance: float | None
    argmax_agreement: float
    positions: int
    outputs: tuple[Output, ...]

    @property
    def same(self) -> bool:
        return all(output.same for output in self.outputs)

    @property
    def first_different(self) -> Output | None:
        return next((output for output in self.outputs if not output.same), None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; numbers that are not finite become text."""
        first = self.first_different
        values = {**asdict(self), "same": self.same, "first_different": first and first.name}
        for output in values["outputs"]:
            for name in ("error", "mean_error", "largest"):
                if not math.isfinite(output[name]):
                    output[name] = str(output[name])
        return values


class _Side(NamedTuple):
    """One side of a comparison: its name in words, what it gives on a case, and where its graph writes that."""

    name: str
    compute: Callable[[Case], Outputs]
    places: dict[str, GraphLocation]

    def run(self, cases: Sequence[Case]) -> Outputs:
        found = [self.compute(case) for case in cases]
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}


def check(
    folder: Path,
    other: Path | None = None,
    *,
    checkpoint: str | None = None,
    layers: bool = False,
    allowed: float | None = None,
    seed: int = 0,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda total, done: None,
) -> Check:
    """Compare an engine with its checkpoint, or with another engine of the same model.

    Args:
        other: another engine's; without it the checkpoint is what the engine is compared with.
        checkpoint: where the checkpoint is, a folder or hub id; default: where the engine was exported from.
        allowed: accepted difference of a logit, instead of the one for the engines' dtypes.
        progress: called with how many texts the checkpoint has to run, and how many it ran since the last call.

    Raises:
        InvalidInput: a folder is no engine, the checkpoint is not there, or the two are of different models.
    """
    spec = read_spec(folder)
    shared, window, specs = spec, None, [spec]
    if other is None:
        source = _find(folder, spec, checkpoint)
        window = sliding_window(source.config)
    else:
        if checkpoint is not None:
            raise InvalidInput("checkpoint", checkpoint, "compare with a checkpoint or with another engine, not both")
        second = read_spec(other)
        for name in ("architecture", "layers", "vocab_size"):
            ours, theirs = getattr(spec, name), getattr(second, name)
            if ours != theirs:
                raise InvalidInput(name, f"{ours} and {theirs}", "these are engines of different models")
        shared = replace(spec, rows=min(spec.rows, second.rows), capacity=min(spec.capacity, second.capacity))
        specs.append(second)
    for one in specs:
        if one.precision in ACTIVATIONS and allowed is None:
            problem = f"an engine of precision {one.precision} does not have its checkpoint's weights; give --tolerance"
            raise InvalidInput("tolerance", None, f"{problem} ({REPORT} in its folder says what it costs on text)")
    cases = make_cases(shared, window, seed)
    engine = _engine(folder, spec, layers, threads)
    if other is None:
        total = sum(len(case.compared[0]) for case in cases)
        progress(total, 0)
        reference = _checkpoint(source, spec, layers, lambda lengths: progress(total, len(lengths)))
    else:
        reference = _engine(other, second, layers, threads)
    limit = sum(TOLERANCE[one.dtype] for one in specs) if allowed is None else allowed
    share = sum(LAYER_TOLERANCE[one.dtype] for one in specs) if layers else None
    ours, theirs = engine.run(cases), reference.run(cases)
    names = [name for name in ours if name in theirs]
    if layers and len(names) < 2:
        raise InvalidInput("layers", engine.name, "it shares no module with what it is compared with")
    outputs = []
    for name in names:
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            raise InvalidInput(name, f"{tuple(a.shape)} and {tuple(b.shape)}", "these are outputs of different models")
        errors, largest = (a - b).abs(), float(b.abs().max())
        accepted = limit if name == "logits" else (share or 0) * largest
        error = float(errors.max())  # nan if there is one
        place = engine.places.get(name)
        outputs.append(Output(name, place, error, float(errors.mean()), largest, accepted, error <= accepted))
    agree = ours["logits"].argmax(-1) == theirs["logits"].argmax(-1)
    return Check(engine.name, reference.name, limit, share, float(agree.float().mean()), len(agree), tuple(outputs))


def _engine(folder: Path, spec: EngineSpec, layers: bool, threads: int) -> _Side:
    name = f"{folder} ({spec.format}, {spec.dtype})"
    engine = open_engine(folder, Placement(threads=threads), min(spec.rows, ROWS))
    if not layers:
        return _Side(name, lambda case: {"logits": run_engine(engine, case)}, {})
    if isinstance(engine, TorchEngine):
        return _Side(name, partial(torch_layers, engine), {})
    if spec.format == "onnx":
        marked = MarkedGraph(folder, threads)
        return _Side(name, partial(marked.layers, engine), marked.places)
    problem = f"{spec.format} engines expose only their logits; check the onnx engine of the same checkpoint"
    raise InvalidInput("layers", str(folder), problem)


def _find(folder: Path, spec: EngineSpec, given: str | None) -> Checkpoint:
    if given is None and not spec.source:
        raise InvalidInput("checkpoint", None, f"{folder} does not say where its checkpoint is; give --checkpoint")
    source = find("checkpoint", given or spec.source)
    architecture = source.config.architectures[0]
    if architecture != spec.architecture:
        problem = f"is a {architecture}, but the engine a {spec.architecture}"
        raise InvalidInput("checkpoint", str(source.folder), problem)
    if given is None and source.digest != spec.checkpoint_hash:
        problem = "has changed since the engine was exported from it; give --checkpoint to compare anyway"
        raise InvalidInput("checkpoint", spec.source, problem)
    return source


def _checkpoint(source: Checkpoint, spec: EngineSpec, layers: bool, each: Callable[[list[int]], None]) -> _Side:
    model = source.load(torch.float32)
    width = model.config.get_text_config().vocab_size
    if width != spec.vocab_size:
        problem = f"has {width} logits, but the engine has {spec.vocab_size}"
        raise InvalidInput("checkpoint", str(source.folder), problem)
    model.set_attn_implementation("eager")

    def compute(case: Case) -> Outputs:
        return checkpoint_layers(model, case, each) if layers else {"logits": run_checkpoint(model, case, each)}

    return _Side(f"{source.folder} (checkpoint, float32)", compute, {})
