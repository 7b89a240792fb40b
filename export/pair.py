"""A target's checkpoint and an auxiliary's in, one pair folder out; or the target's alone."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from engines.base import EngineSpec
from engines.folder import read_json, read_spec, write_folder, write_json, write_spec
from engines.kinds import QUANTIZED, STATIC
from export.engine import EXECUTED, PLAIN, quantize_engine, write_engine, write_plain, write_reports, write_static
from export.options import MEASURED, ExportOptions, Progress
from export.plan import PairPlan, plan_pair
from mtad.errors import InvalidInput

log = logging.getLogger(__name__)


def export_pair(
    folder: Path, options: ExportOptions, overwrite: bool = False, progress: Progress = lambda stage: None
) -> bool:
    """Compile checkpoints and write `folder/target`, `folder/auxiliary` if there is one, and `folder/pair.json`.

    Everything that can be wrong with the input is checked first. Both engines are compared with their checkpoints
    before the folder takes its name; an interrupted export leaves nothing under it. An engine is built only if its hash
    (`export.plan.build_hash`) is not that of the one in the folder.

    Returns:
        False if the folder was already what this call would write, so that nothing was done.

    Raises:
        InvalidInput: before anything is compiled, or when a model cannot be written as a graph; nothing is left behind.
        VerificationFailed: an engine does not compute what its checkpoint computes; nothing is left behind.
    """
    plan = plan_pair(options, progress)
    folder = folder.resolve()  # through links: what they lead to is replaced, and they stay
    if not check_folder(folder, plan, overwrite):
        return False
    new = [model.name for model, spec, _ in plan.engines if engine_differs(folder / model.name, spec)]
    if new:  # of a plan nothing is left to measure: those with 8-bit products are made together
        new += [model.name for model, spec, _ in plan.engines if spec.precision in STATIC]
    progress = _counted(progress, plan, new)
    with write_folder(folder) as pair:
        work = pair / "work"
        work.mkdir()
        if plan.calibration is not None and new:
            write_plain(work / PLAIN, plan, progress)
        for model, spec, tokenizer in plan.engines:
            own, source = pair / model.name, work / PLAIN / model.name
            if model.name not in new:
                progress(f"{model.name}: unchanged")
                shutil.copytree(folder / model.name, own, copy_function=_link)
                continue
            own.mkdir()
            if spec.precision in QUANTIZED:
                quantize_engine(source, own, model, spec, progress)
            elif spec.precision in STATIC:
                assert plan.calibration is not None
                executed = work / EXECUTED / model.name
                write_static(source, own, executed, model, spec, plan.calibration.texts[model.name], progress)
            else:
                write_engine(own, model, spec, tokenizer, progress)
        for model, spec, _ in plan.engines:
            write_spec(pair / model.name, spec)
        write_json(pair / "pair.json", plan.description)
        if plan.calibration is not None and new:
            progress("measuring")
            write_reports(work, pair, plan, plan.calibration)
        shutil.rmtree(work)
    return True


def _counted(progress: Progress, plan: PairPlan, new: Collection[str]) -> Progress:
    """`progress`, told beside each stage how much was done before it: an engine's stages count as its weights do."""
    sizes = {model.name: model.size for model, _, _ in plan.engines}
    total = 2 * sum(sizes.values()) if plan.calibration is not None and new else 0
    total += sum(sizes[m.name] * (2 + (s.plan is not None)) for m, s, _ in plan.engines if m.name in new)
    begun: list[int] = []

    def counted(stage: str) -> None:
        done = 100 * sum(begun) // max(total, 1)
        name, _, action = stage.partition(": ")
        begun.append(sizes.get(name, 0) if action != "unchanged" else 0)
        progress(f"{done} %, {stage}")

    return counted


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # a file system without links
        shutil.copy2(source, to)


def check_folder(folder: Path, plan: PairPlan, overwrite: bool) -> bool:
    """Whether there is anything to write.

    Raises:
        InvalidInput: the folder holds something that may not be replaced.
    """
    if not folder.exists():
        return True
    different, tuned = _differences(folder, plan)
    if not different:
        return False
    if not (folder / "pair.json").is_file():
        raise InvalidInput("pair", str(folder), "exists and was not written by mtad export; give another name")
    if not overwrite:
        loss = " (its tuning is lost then)" if tuned else ""
        problem = f"exists and holds something else ({different}); give another name or --overwrite{loss}"
        raise InvalidInput("pair", str(folder), problem)
    if tuned:
        log.warning("%s was tuned, for what it held before: run mtad tune again", folder)
    return True


def _differences(folder: Path, plan: PairPlan) -> tuple[str, bool]:
    """What an export would change in `folder`, in words, empty if nothing; and whether the pair there was tuned."""
    found = {model.name: engine_differs(folder / model.name, spec) for model, spec, _ in plan.engines}
    tuned = False
    try:
        pair = read_json(folder, "pair.json")
        tuned = "tuning" in pair
        for since in ("tuned", "tuning", "costs"):
            pair.pop(since, None)
        same = pair == json.loads(json.dumps(plan.description))
        found["pair.json"] = [] if same else sorted(k for k in plan.description if pair.get(k) != plan.description[k])
    except InvalidInput:
        found["pair.json"] = ["damaged"]
    return "; ".join(f"{name}: {', '.join(fields)}" for name, fields in found.items() if fields), tuned


def engine_differs(folder: Path, spec: EngineSpec) -> list[str]:
    """What is not as in the engine of `folder`; its source does not count."""
    try:
        there, wanted = asdict(read_spec(folder)), asdict(spec)
    except InvalidInput:
        return ["missing or damaged"]
    different = [name for name in wanted if name != "source" and there[name] != wanted[name]]
    if different == ["build_hash"]:
        return ["exporter, tokenizer or calibration text" if spec.precision in MEASURED else "exporter or tokenizer"]
    return [name for name in different if name != "build_hash"]
