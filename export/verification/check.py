"""`mtad check`: does an engine compute what its checkpoint computes, or what another engine does?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engines.base import EngineSpec
from engines.folder import open_engine, read_spec
from engines.placement import Placement
from engines.pytorch.hook import set_arithmetic
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.find import find
from export.quantization.report import REPORT
from export.verification.verify import ACTIVATIONS, Case, expect, few_rows, make_cases, run_engine, tolerance
from mtad.errors import InvalidInput


@dataclass(frozen=True)
class Check:
    """The logits of an engine beside those of a reference.

    Attributes:
        error: largest absolute difference of a logit.
        tolerance: largest difference that is accepted.
        argmax_agreement: share of compared positions with the same likeliest token.
    """

    engine: str
    reference: str
    error: float
    tolerance: float
    argmax_agreement: float
    positions: int

    @property
    def same(self) -> bool:
        return self.error <= self.tolerance  # not if it is no number

    def __str__(self) -> str:
        return (
            f"{self.engine}\nagainst {self.reference}\n\n"
            f"logits: largest difference {self.error:.3g} (allowed {self.tolerance:.3g}); "
            f"the same likeliest token at {self.argmax_agreement:.1%} of {self.positions} positions\n"
            f"{'same' if self.same else 'DIFFERENT'}"
        )


@torch.inference_mode()
def check(
    folder: Path,
    other: Path | None = None,
    *,
    checkpoint: str | None = None,
    allowed: float | None = None,
    threads: int = 1,
) -> Check:
    """Compare an engine with its checkpoint, or with another engine of the same model.

    Args:
        other: folder of another engine; without it the checkpoint is what the engine is compared with.
        checkpoint: where the checkpoint is, a folder or hub id; default: where the engine was exported from.
        allowed: accepted difference of a logit, instead of the one for the engines' dtypes.

    Raises:
        InvalidInput: a folder is no engine, the checkpoint is not there, or the two are of different models.
    """
    folders = [folder] if other is None else [folder, other]
    if other is not None and checkpoint is not None:
        raise InvalidInput("checkpoint", checkpoint, "compare with a checkpoint or with another engine, not both")
    specs = [read_spec(one) for one in folders]
    for name in ("architecture", "layers", "vocab_size"):
        values = [getattr(spec, name) for spec in specs]
        if len(set(values)) > 1:
            raise InvalidInput(name, " and ".join(map(str, values)), "these are engines of different models")
    for spec in specs:
        if spec.precision in ACTIVATIONS and allowed is None:
            problem = f"an {spec.precision} engine does not have its checkpoint's weights; give --tolerance"
            raise InvalidInput("tolerance", None, f"{problem} ({REPORT} in its folder says what it costs on text)")
    source = _find(folder, specs[0], checkpoint) if other is None else None
    each = list(zip(folders, specs, strict=True))
    engines = [open_engine(one, Placement(threads=threads), few_rows(spec).rows) for one, spec in each]
    names = [f"{one} ({spec.format}, {spec.dtype})" for one, spec in each]
    if source is None:
        smallest = {size: min(getattr(spec, size) for spec in specs) for size in ("rows", "capacity")}
        cases: tuple[Case, ...] = make_cases(replace(specs[0], **smallest), None)
        expected = torch.cat([run_engine(engines[1], case) for case in cases])
    else:
        model = source.load(torch.float32)
        set_arithmetic(model, "eager", "eager")
        names.append(f"{source.folder} (checkpoint, float32)")
        cases, expected = expect(model, specs[0])
    found = torch.cat([run_engine(engines[0], case) for case in cases])
    return Check(
        engine=names[0],
        reference=names[1],
        error=float((found - expected).abs().max()),
        tolerance=sum(tolerance(spec.dtype, expected) for spec in specs) if allowed is None else allowed,
        argmax_agreement=float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        positions=len(found),
    )


def _find(folder: Path, spec: EngineSpec, given: str | None) -> Checkpoint:
    if given is None and not spec.source:
        raise InvalidInput("checkpoint", None, f"{folder} does not say where its checkpoint is; give --checkpoint")
    source = find("checkpoint", given or spec.source)
    config = source.config
    theirs, ours = (config.architectures[0], config.get_text_config().vocab_size), (spec.architecture, spec.vocab_size)
    if theirs != ours:
        problem = f"is a {theirs[0]} with {theirs[1]} logits, but the engine a {ours[0]} with {ours[1]}"
        raise InvalidInput("checkpoint", str(source.folder), problem)
    if given is None and source.digest != spec.checkpoint_hash:
        problem = "has changed since the engine was exported from it; give --checkpoint to compare anyway"
        raise InvalidInput("checkpoint", spec.source, problem)
    return source
