"""What steps of an engine take here, and which provider runs it fastest: timed once, kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engines.base import Engine, EngineSpec, Step
from engines.folder import open_engine
from engines.kinds import FORMATS, QUANTIZED
from engines.placement import Placement, versions
from mtad.compiled import cache_folder
from mtad.errors import InvalidInput

log = logging.getLogger(__name__)

CPU = Path("/proc/cpuinfo")
LEVELS, BEAMS = 4, 4
"""Of the draft that is measured."""
ENOUGH = 1.0
"""Seconds after which no repetition begins: steps of large models take so long that what disturbs one hardly counts."""


def choose_provider(placement: Placement, engines: Mapping[Path, EngineSpec]) -> tuple[Placement, str]:
    """A provider for all of these engines, where they are ONNX graphs, and why it is that one.

    On a CPU that is openvino where it is installed and knows the models, if the CPU computes in bfloat16 or an option
    of openvino is given. With quantized weights it is what is faster for the first engine: how fast either library
    multiplies them depends on the CPU in more ways than a rule could name. Where a provider was asked for, it stays.
    """
    if placement.provider is not None or any(FORMATS[spec.format].stored != "graph" for spec in engines.values()):
        return placement, ""
    if placement.on_gpu:
        return replace(placement, provider="cuda"), f"--provider auto is cuda on {placement.device}"
    from engines.openvino.graph import computes_bfloat16, read_graph

    (first, spec), asked = next(iter(engines.items())), placement.compute or placement.kv_cache
    chosen = replace(placement, provider="cpu")
    try:
        if not (asked or spec.precision in QUANTIZED or computes_bfloat16()):
            why = "this CPU has no bfloat16, and without it ONNX Runtime is faster than OpenVINO"
            return chosen, f"--provider auto is cpu here: {why}"
        for folder, own in engines.items():
            read_graph(folder / "model.onnx", own)
    except InvalidInput as refused:
        return chosen, f"--provider auto is cpu here: openvino does not work here: {refused.problem}"
    chosen = replace(placement, provider="openvino")
    why = "it is installed and knows both models; cpu is the exact reference"
    if spec.precision in QUANTIZED and not asked:
        chosen, why = fastest_placement(first, spec, chosen), "it was faster with these weights than the other"
    return chosen, f"--provider auto is {chosen.provider} here: {why}"


def fastest_placement(folder: Path, spec: EngineSpec, placement: Placement) -> Placement:
    """The same on OpenVINO or ONNX Runtime: where steps over two to four tokens of one row and of all take less time.

    Small models are bound by what a library does between operators, which ONNX Runtime has less of.

    Args:
        spec: of the folder's engine, with the rows that it will have.
        placement: on OpenVINO; what is returned if that is the faster one.
    """
    cpu = {line for line in CPU.read_text().splitlines() if line[:5] in ("model", "flags")} if CPU.is_file() else ()
    about = sorted(cpu), spec, placement, versions("mtad", "onnxruntime", "onnxruntime-gpu", "openvino")
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


def step_seconds(engine: Engine, tokens: int) -> float:
    """Seconds of a step of one row over so many tokens behind a prompt, the least of a few."""
    start = min(96, engine.spec.capacity - tokens)
    _store(engine, 1, start)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return _least(engine, [Step.causal(ids, start, engine.spec.capacity, torch.arange(tokens))])


def draft_seconds(engine: Engine, rows: int) -> float:
    """Seconds of the steps of a draft of `LEVELS` x `BEAMS` behind a prompt, the least of a few."""
    spec = engine.spec
    length = min(128, spec.capacity)
    start, columns = length - (LEVELS - 1) * BEAMS, torch.arange(length)
    _store(engine, rows, start)
    steps = [Step.causal(torch.zeros(rows, 2, dtype=torch.int64), start - 2, spec.capacity, columns[1:2])]
    for level in range(LEVELS - 1):
        first = torch.full((rows,), start + level * BEAMS)
        behind = columns - start  # each beam sees the slots of its own above it
        sees = (behind < 0) | ((behind % BEAMS == columns[:BEAMS, None]) & (behind < (level + 1) * BEAMS))
        mask = sees.expand(rows, 1, BEAMS, length)
        tokens = torch.zeros(rows, BEAMS, dtype=torch.int64)
        out = torch.empty(rows, BEAMS, spec.vocab_size, dtype=spec.torch_dtype)
        own = tokens, tokens + start + level, first, mask.contiguous(), columns[:BEAMS]
        steps.append(Step(*own, out=out, drafted=level * BEAMS))
    return _least(engine, steps)


def _store(engine: Engine, rows: int, tokens: int) -> None:
    engine.step(Step.causal(torch.zeros(rows, tokens, dtype=torch.int64), 0, engine.spec.capacity, torch.arange(0)))


def _least(engine: Engine, steps: Sequence[Step]) -> float:
    least, end = math.inf, time.perf_counter() + ENOUGH
    for _ in range(8):
        began = time.perf_counter()
        for step in steps:
            engine.step(step)
        least = min(least, time.perf_counter() - began)
        if time.perf_counter() > end:
            break
    engine.cache.reset()
    return least
