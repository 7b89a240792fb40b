"""What a step of one engine costs, by rows, by tokens per row and by the model's size.

Models are the targets of the demo pair and of its copies; each engine opens the same checkpoint. Every step keeps the
logits of all its tokens, behind a context of 128. The steps of one engine take turns.
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engines.base import Engine, Step
from engines.folder import open_engine
from engines.openvino.graph import computes_bfloat16
from engines.placement import Placement, cores
from scripts.bench.intervals import median_interval
from scripts.bench.pairs import exported
from scripts.results import Rows

ENGINES = {
    "onnxruntime f32": ("onnx", None, "cpu", None),
    "onnxruntime int8": ("onnx", "int8", "cpu", None),
    "onnxruntime int4": ("onnx", "int4", "cpu", None),
    "openvino f32": ("onnx", None, "openvino", "float32"),
    "openvino bf16": ("onnx", None, "openvino", "bfloat16"),
    "openvino int8": ("onnx", "int8", "openvino", None),
    "openvino int4": ("onnx", "int4", "openvino", None),
    "torch f32": ("torch", None, None, None),
}
"""Format, precision, provider and compute by engine."""
TOKENS = (1, 5, 17)
CONTEXT, WARM_UP, REPEATS = 128, 3, 24
"""Tokens before a step, steps that are not timed, and that are."""


def measure(engine: Engine, rows: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a step, a `median_interval`, for each number of rows and of tokens."""
    capacity = engine.spec.capacity
    prompts = torch.ones(max(rows), CONTEXT, dtype=torch.int64)
    engine.step(Step.causal(prompts, 0, capacity, keep=torch.arange(0)))
    points = list(itertools.product(rows, TOKENS))
    ones = [torch.ones(point, dtype=torch.int64) for point in points]
    steps = [Step.causal(tokens, CONTEXT, capacity, torch.arange(tokens.shape[1])) for tokens in ones]
    taken: list[list[float]] = [[] for _ in points]
    for _ in range(WARM_UP + repeats):
        for step, own in zip(steps, taken, strict=True):
            started = time.perf_counter()
            engine.step(step)
            own.append(1e3 * (time.perf_counter() - started))
    intervals = [median_interval(own[WARM_UP:]) for own in taken]
    return [{"rows": n, "tokens": k, "ms": ms} for (n, k), ms in zip(points, intervals, strict=True)]


def run(options: Namespace) -> dict[str, Any]:
    """Measure every engine that this CPU runs, at each size."""
    rows, sizes, repeats = sorted(set(options.rows)), options.sizes, REPEATS
    if options.quick:
        rows, sizes, repeats = [1, 2], ["demo"], 3
    engines = [name for name, (*_, kind) in ENGINES.items() if kind != "bfloat16" or computes_bfloat16()]
    found = []
    torch.set_num_threads(cores())
    for size, name in tqdm(list(itertools.product(sizes, engines)), desc="steps", unit="engine"):
        format, precision, provider, compute = ENGINES[name]
        place = Placement(threads=cores(), provider=provider, compute=compute)
        engine = open_engine(exported(size, format, precision) / "target", place, rows[-1])
        found += [{"engine": name, "size": size, **one} for one in measure(engine, rows, repeats)]
    return {"steps": found}


def tables(figures: Mapping[str, Any]) -> dict[str, Rows]:
    """Milliseconds by tokens per row."""
    cells = {(one["engine"], one["size"], str(one["rows"]), one["tokens"]): one["ms"] for one in figures["steps"]}
    lines = [["engine", "size", "rows", *(f"{n} token{'s' * (n > 1)}, ms" for n in TOKENS), "last : first"]]
    for place in dict.fromkeys(point[:3] for point in cells):
        taken = [cells[*place, tokens]["median"] for tokens in TOKENS]
        lines.append([*place, *(f"{one:.2f}" for one in taken), f"{taken[-1] / taken[0]:.2f}"])
    return {"steps": lines}


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """A panel for tokens, for rows and for sizes, a line per engine; others: 5 tokens, first rows, first size."""
    from matplotlib.figure import Figure

    first = figures["steps"][0]
    usual, figure = {"tokens": 5, "rows": first["rows"], "size": first["size"]}, Figure((15, 4.2), layout="constrained")
    for axis, x in zip(figure.subplots(1, 3), usual, strict=True):
        fixed, grown = {name: value for name, value in usual.items() if name != x}, []
        chosen = [one for one in figures["steps"] if fixed.items() <= one.items()]
        for engine in dict.fromkeys(one["engine"] for one in chosen):
            own = {str(one[x]): one["ms"]["median"] for one in chosen if one["engine"] == engine}
            axis.plot(list(own), list(own.values()), marker="o", label=engine)
            grown.append(list(own.values())[-1] / next(iter(own.values())))
        ends = f"{x}, from {chosen[0][x]} to {chosen[-1][x]}"
        axis.set_title(f"{ends}:\na step costs {min(grown):.1f} to {max(grown):.1f} times as much", fontsize=11)
        axis.set(xlabel=f"{x} per row" if x == "tokens" else x, ylabel="ms per step", yscale="log")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=130)
