"""Which provider runs an engine fastest on this CPU: timed once, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engines.base import EngineSpec
from engines.folder import open_engine
from engines.kinds import QUANTIZED
from engines.placement import Placement, versions
from mtad.compiled import cache_folder
from runtime.step_times import draft_seconds

log = logging.getLogger(__name__)

CPU = Path("/proc/cpuinfo")


def choose_provider(placement: Placement, engines: Mapping[Path, EngineSpec]) -> tuple[Placement, str]:
    """`Placement.chosen`; with quantized weights, where that is OpenVINO, what is faster for the first engine.

    How fast either library multiplies such weights depends on the CPU in more ways than a rule could name.
    """
    (chosen, why), (folder, spec) = placement.chosen(engines), next(iter(engines.items()))
    asked = not why or chosen.compute or chosen.kv_cache
    if chosen.provider == "openvino" and not asked and spec.precision in QUANTIZED:
        chosen = fastest_placement(folder, spec, chosen)
        why = f"--provider auto is {chosen.provider} here: it was faster with these weights than the other"
    return chosen, why


def fastest_placement(folder: Path, spec: EngineSpec, placement: Placement) -> Placement:
    """The same on OpenVINO or ONNX Runtime: where steps over two to four tokens of one row and of all take less time.

    Small models are bound by what a library does between operators, which ONNX Runtime has less of.

    Args:
        spec: of the folder's engine, with the rows that it will have.
        placement: on OpenVINO; what is returned if that is the faster one.
    """
    cpu = {line for line in CPU.read_text().splitlines() if line[:5] in ("model", "flags")} if CPU.is_file() else ()
    about = sorted(cpu), spec, placement, versions("onnxruntime", "onnxruntime-gpu", "openvino")
    key = f"fastest-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"
    places = {"openvino": placement, "cpu": replace(placement, provider="cpu", compute=None, kv_cache=None)}
    for name, own in places.items():
        if (cache_folder() / f"{key}-{name}").is_file():
            return own
    log.info("timing %s by OpenVINO and by ONNX Runtime, once on this machine", folder.name)
    taken = {name: _seconds(folder, own, spec.rows) for name, own in places.items()}
    best = min(taken, key=taken.__getitem__)
    (cache_folder() / f"{key}-{best}").touch()
    log.info("%s: provider %s, as %s says from now on; seconds taken: %s", folder.name, best, cache_folder(), taken)
    return places[best]


def _seconds(folder: Path, placement: Placement, rows: int) -> float:
    """Of steps over one row and over all; the engine is gone afterwards, so that never two take memory."""
    engine = open_engine(folder, placement, rows)
    return draft_seconds(engine, 1) + draft_seconds(engine, rows)
