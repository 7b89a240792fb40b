"""How the cost of an engine's step grows with tokens, rows, context, size and vocabulary.

    mtad bench steps                       all of it, half an hour; an interrupted run goes on where it ended
    mtad bench steps --quick               a minute, to see that it works, into build/results

Models have random weights and the demo target's layers; wider MLPs make them larger. Every step keeps the logits of all
its tokens. The points of one engine take turns; figures are medians with 95 % intervals.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from engines import Engine, Placement, Step, open_engine
from engines.base import KV_PAGE
from engines.folder import write_folder, write_spec
from engines.openvino.graph import computes_bfloat16
from engines.placement import cores
from export.checkpoint.checkpoint import find
from export.onnx.graph import write_graph
from runtime.commands.entry import Parser
from scripts.bench.gate import median_interval
from scripts.bench.peers.models import SIZES
from scripts.bench.peers.store import Store
from scripts.bench.steps_report import plot, table
from scripts.demo import inflate
from scripts.machine import machine
from scripts.paths import DEMO, RESULTS, ROOT

BUILD = ROOT / "build" / "peers"
ENGINES = {
    "onnxruntime f32": ("onnx", "cpu", None),
    "openvino f32": ("onnx", "openvino", "float32"),
    "openvino bf16": ("onnx", "openvino", "bfloat16"),
    "torch f32": ("torch", None, None),
}
"""Format, provider and compute by engine."""
TOKENS = (1, 5, 17)
SWEEPS = ("rows", "context", "size", "vocabulary")
CONTEXT, CHUNK = 128, 256


@dataclass(frozen=True)
class Model:
    """What an engine is made of: parameters (a name of `inflate.SIZES`, or demo), vocabulary, columns per row."""

    size: str = "demo"
    vocabulary: int = 2048
    capacity: int = 512

    def checkpoint(self, folder: Path) -> None:
        """Write a checkpoint with random weights."""
        config = AutoConfig.from_pretrained(DEMO / "pair" / "target")
        config.vocab_size, config.max_position_embeddings = self.vocabulary, self.capacity
        if self.size != "demo":
            with torch.device("meta"):
                missing = inflate.SIZES[self.size][0] - AutoModelForCausalLM.from_config(config).num_parameters()
            wider = math.ceil(missing / (3 * config.num_hidden_layers * config.hidden_size))
            config.intermediate_size += wider + -wider % inflate.MULTIPLE
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder)

    def folder(self, format: str) -> Path:
        """The engine's folder, made when it is first asked for."""
        folder = BUILD / "steps" / f"{self.size}-{self.vocabulary}-{self.capacity}-{format}"
        if not folder.is_dir():
            with write_folder(folder) as new:
                self.checkpoint(new / "checkpoint")
                checkpoint = find("target", str(new / "checkpoint"))
                spec = checkpoint.spec(1, self.capacity, "float32", format)
                if format == "onnx":
                    write_graph(checkpoint.empty("float32"), checkpoint.weights(), spec, new / "model.onnx")
                else:
                    checkpoint.load(torch.float32).save_pretrained(new, max_shard_size=2**63)
                write_spec(new, spec)
        return folder


@dataclass(frozen=True)
class Point:
    """A step that is timed: of `rows` rows with `tokens` tokens each, behind `context` columns."""

    rows: int
    tokens: int
    context: int = CONTEXT


def fill(engine: Engine, rows: int, start: int, context: int) -> None:
    """Columns `start` to `context` of all rows."""
    for at in range(start, context, CHUNK):
        tokens = torch.ones(rows, min(CHUNK, context - at), dtype=torch.int64)
        engine.step(Step.causal(tokens, at, engine.spec.capacity, keep=torch.arange(0)))


def timed_step(engine: Engine, point: Point) -> Callable[[], float]:
    """What runs the step once and returns its seconds."""
    tokens = torch.ones(point.rows, point.tokens, dtype=torch.int64)
    step = Step.causal(tokens, point.context, engine.spec.capacity, torch.arange(point.tokens))

    def run() -> float:
        started = time.perf_counter()
        engine.step(step)
        return time.perf_counter() - started

    return run


def take_turns(runs: Mapping[Any, Callable[[], float]], repeats: int, seconds: float) -> dict[Any, list[float]]:
    """Seconds of each, in turn, after three rounds to warm up; fewer than `repeats` where they take over `seconds`."""
    taken: dict[Any, list[float]] = {name: [] for name in runs}
    for number in range(3 + repeats):
        for name, run in runs.items():
            took = run()
            if number >= 3:
                taken[name].append(took)
        if number >= 8 and sum(map(sum, taken.values())) > seconds:
            break
    return taken


def measure_points(engine: Engine, points: Sequence[Point], repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of each point, a `median_interval`; points of equal context take turns."""
    rows, filled, found = max(point.rows for point in points), 0, []
    for context in sorted({point.context for point in points}):
        fill(engine, rows, filled, context)
        filled = context
        runs = {point: timed_step(engine, point) for point in points if point.context == context}
        taken = take_turns(runs, repeats, seconds)
        found += [asdict(point) | {"ms": median_interval([1e3 * one for one in own])} for point, own in taken.items()]
    return found


def units(sweeps: Sequence[str], sizes: Sequence[str], quick: bool) -> list[tuple[str, Model, list[Point]]]:
    """What is measured with one engine open: the sweep, its model, its points."""
    some = slice(2) if quick else slice(None)
    contexts = [128, 512, 2048, 8192, 16384][some]
    found, one_row = [], [Point(1, tokens) for tokens in TOKENS]
    if "rows" in sweeps:
        found += [("rows", Model(s), [Point(r, t) for r in [1, 8, 32][some] for t in TOKENS]) for s in sizes[:2]]
    if "context" in sweeps:
        model = Model(capacity=max(contexts) + KV_PAGE)
        found.append(("context", model, [Point(1, tokens, context) for context in contexts for tokens in TOKENS]))
    if "size" in sweeps:
        found += [("size", Model(size), one_row) for size in sizes]
    if "vocabulary" in sweeps:
        found += [("vocabulary", Model(vocabulary=v), one_row) for v in [2048, 32768, 131072][some]]
    return found


def _points_of(name: str, model: Model, points: Sequence[Point], options: Namespace) -> list[dict[str, Any]]:
    format, provider, compute = ENGINES[name]
    placement = Placement(threads=options.threads, provider=provider, compute=compute)
    engine = open_engine(model.folder(format), placement, max(point.rows for point in points))
    return measure_points(engine, points, options.repeats, options.seconds)


def run(arguments: Sequence[str]) -> None:
    """The command; see the module's description."""
    own = Parser(prog="mtad bench steps", description=(__doc__ or "").splitlines()[0])
    own.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS), help="(default all)")
    own.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of the target (default all)")
    own.add_argument("--engines", nargs="+", choices=ENGINES, help="(default all that this CPU runs)")
    own.add_argument("--repeats", type=int, default=60, help="of each step (default %(default)s)")
    own.add_argument("--seconds", type=float, default=20.0, help="for steps that take turns (default %(default)s)")
    own.add_argument("--threads", type=int, default=cores(), help="of an engine (default: all cores)")
    own.add_argument("--fresh", action="store_true", help="forget what an interrupted run has measured")
    own.add_argument("--quick", action="store_true", help="few values of the demo's size, into build/results")
    own.add_argument("--results", type=Path, help="folder to write to (default docs/results)")
    options = own.parse_args(arguments)
    if options.engines is None:
        options.engines = [one for one, (*_, kind) in ENGINES.items() if kind != "bfloat16" or computes_bfloat16()]
    if options.quick:
        options.sizes, options.repeats, options.seconds = ["demo"], 8, 2.0
    torch.set_num_threads(options.threads)
    path = BUILD / "steps" / f"measured-{options.threads}-{options.repeats}-{options.seconds:g}.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    store, sets = Store(path), dict[str, list[dict[str, Any]]]()

    def keep(sweep: str, key: dict[str, Any], measure: Callable[[], list[dict[str, Any]]]) -> None:
        if not store.has(sweep=sweep, **key):
            for row in measure():
                store.add(sweep=sweep, **key, **row)
        sets.setdefault(sweep, []).extend(row for row in store.rows if {"sweep": sweep, **key}.items() <= row.items())

    work = units(options.sweeps, options.sizes, options.quick)
    for sweep, model, points in tqdm(work, desc="steps", unit="model"):
        for name in options.engines:
            keep(sweep, {"engine": name, **asdict(model)}, partial(_points_of, name, model, points, options))
    report = {"command": f"mtad bench {shlex.join(sys.argv[1:])}", "machine": machine(), "sets": sets}
    folder = options.results or (ROOT / "build" / "results" if options.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(sets, folder / "steps.png")
    print(*(f"\n{sweep}\n\n{table(rows)}" for sweep, rows in sets.items()), f"\nwritten to {folder}", sep="\n")
