"""Measure the runtime on the demo pair.

    python -m scripts.bench tune        choose accept_threshold for each kind of text, on the development split
    python -m scripts.bench overhead    share of a block that is spent outside the two engines' `step`
    python -m scripts.bench serving     throughput and latency under load, against outside baselines: scripts/serving.py
    python -m scripts.bench server      the HTTP server under load, against plain AsyncLLM: scripts/server_load.py

Methods are compared by scripts/evaluate.py. `overhead` times single blocks of 1 and 8 rows, after prompts of 100 and of
500 tokens, methods interleaved, and reports medians.

Prints tables and, as its last line, one JSON object; `tune` writes scripts/demo/tuned.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engines import Engine
from mtad.errors import InvalidInput, Parser, command
from mtad.params import METHODS
from runtime import LLM, DecodingParams
from runtime.placement_options import add_placement, placement_of
from runtime.tune import Objective, describe
from runtime.tune import tune as search
from runtime.tune_command import curve
from scripts.demo import dataset
from scripts.evaluation.prompts import Demo

ROOT = Path(__file__).resolve().parent.parent
TUNED = ROOT / "scripts" / "demo" / "tuned.json"
KINDS = {"sql": "text-to-SQL", "code": "source code"}
THRESHOLDS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
PERPLEXITY_MARGIN = 0.75
"""`tune` asks on open-ended text for at most this share of `sample`'s perplexity (the paper's claim is 0.788)."""


BASE = DecodingParams(max_tokens=128)
"""Gamma 4, B 4, temperature 1, top-k 10, top-p 0.9."""
BASELINES = {
    "sample": replace(BASE, method="sample"),
    "greedy": replace(BASE, method="sample", temperature=0.0),
    "speculative": replace(BASE, method="speculative"),
}


def methods(kind: str) -> dict[str, DecodingParams]:
    """The methods compared, with the thresholds of tuned.json."""
    if not TUNED.is_file():
        raise InvalidInput("thresholds", str(TUNED), "no such file; run python -m scripts.bench tune")
    tuned = json.loads(TUNED.read_text(encoding="utf-8"))[kind]
    return BASELINES | {name: replace(BASE, method=name, **tuned[name]) for name in ("mtad", "mmtad")}


def tune(llm: LLM, count: dict[str, int]) -> dict[str, Any]:
    """Choose thresholds of `mtad` and `mmtad` for each kind of text on the development split, as `mtad-tune` does.

    SQL: the fastest whose accuracy and perplexity are no worse than `sample`'s. Open-ended text: the fastest whose
    perplexity is at most `PERPLEXITY_MARGIN` of `sample`'s. Where none is, the one that comes nearest.
    """
    report: dict[str, Any] = {}
    chosen: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, name in KINDS.items():
        task = Demo(kind, "development", count[kind])
        objective = Objective(max_perplexity=1.0 if task.scored else PERPLEXITY_MARGIN)
        report[kind], chosen[kind] = {}, {}
        for method in ("mtad", "mmtad"):
            with tqdm(desc=f"{name}, {method}", unit="answer", file=sys.stderr) as bar:

                def progress(done: int, total: int, bar: Any = bar) -> None:
                    bar.total = total
                    bar.update(done - bar.n)

                found = search(
                    llm,
                    [prompt.text for prompt in task.prompts],
                    replace(BASE, method=method),
                    objective,
                    {"accept_threshold": THRESHOLDS},
                    right=task.right,
                    progress=progress,
                )
            print(f"\n{name}, development split, {len(task.prompts)} prompts, {method}\n{curve(found)}")
            report[kind][method], chosen[kind][method] = describe(found, objective), found.choice.values
    written = {**chosen, "defaults": {"method": "mtad", **chosen["sql"]["mtad"]}}
    TUNED.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    print(f"\nchosen: {json.dumps(chosen)}")
    return {"chosen": chosen, "development": report}


def measure_overhead(llm: LLM, blocks: int) -> dict[str, Any]:
    """Median milliseconds of a block and of its engine steps, at 1 and 8 rows, after short and long prompts."""
    clock = {"target": 0.0, "auxiliary": 0.0}

    def timed(name: str, engine: Engine) -> Callable[[], Any]:
        plain = engine.step

        def step(*args: Any) -> Any:
            started = time.perf_counter()
            logits = plain(*args)
            clock[name] += time.perf_counter() - started
            return logits

        vars(engine)["step"] = step
        return lambda: vars(engine).pop("step")

    restore = [timed("target", llm.pair.target), timed("auxiliary", llm.pair.auxiliary)]
    text = "\n".join(example.prompt for example in dataset.load("test", "code"))
    long = llm.pair.tokenizer(text).input_ids
    samples: dict[tuple[str, int, int], list[tuple[float, float, float]]] = {}
    compared = {name: p for name, p in methods("sql").items() if name != "greedy"}
    rounds = 4
    cases = [(length, rows) for length in (100, 500) for rows in (1, min(8, llm.pair.target.spec.rows))]
    for _ in tqdm(range(rounds), desc="overhead", unit="round", file=sys.stderr):
        for length, rows in cases:
            for name, params in compared.items():
                for row in range(rows):
                    prompt = long[row * 500 : row * 500 + length]
                    llm.add(prompt, replace(params, seed=row, ignore_eos=True, max_tokens=400))
                while len(llm.loop.scheduler.running) < rows:  # turns that store prompts as well
                    llm.step()
                for block in range(4 + blocks // rounds):
                    clock.update(target=0.0, auxiliary=0.0)
                    started = time.perf_counter()
                    llm.step()
                    whole = time.perf_counter() - started
                    if block >= 4:  # the first ones warm up
                        times = whole, clock["target"], clock["auxiliary"]
                        samples.setdefault((name, length, rows), []).append(times)
                llm.cancel(*llm.loop.scheduler.running)
    for undo in restore:
        undo()
    report: dict[str, Any] = {}
    print(f"\n{'method':<12} prompt  rows  block ms  target ms  auxiliary ms  outside  (medians of {blocks} blocks)")
    for (name, length, rows), taken in samples.items():
        outside = statistics.median(1 - (target + auxiliary) / whole for whole, target, auxiliary in taken)
        whole, target, auxiliary = (statistics.median(column) * 1e3 for column in zip(*taken, strict=True))
        print(f"{name:<12} {length:>6}  {rows:>4}  {whole:8.2f}  {target:9.2f}  {auxiliary:12.2f}  {outside:6.1%}")
        report[f"{name}, prompt of {length}, {rows} rows"] = {
            "block_ms": whole,
            "target_ms": target,
            "auxiliary_ms": auxiliary,
            "outside_share": outside,
        }
    return report


@command
def main() -> None:
    """Entry point."""
    parser = Parser(prog="scripts.bench", description="Measure the decoding methods on the demo pair.")
    parser.add_argument("what", choices=("tune", "overhead", "serving", "server"))
    parser.add_argument(
        "--pair", type=Path, default=ROOT / "build" / "demo-pair", help="pair folder (default %(default)s)"
    )
    parser.add_argument("--sql", type=int, default=300, help="SQL questions (default %(default)s)")
    parser.add_argument("--code", type=int, default=80, help="code prompts (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=60, help="blocks timed by overhead (default %(default)s)")
    add_placement(parser)
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="of prompts (default both)"
    )
    serving.add_argument("--loads", type=int, nargs="+", help="requests in flight (default 1 2 4 8 16)")
    serving.add_argument("--rounds", type=int, help="slices of each system at each load (default 4)")
    serving.add_argument("--seconds", type=float, help="length of a slice (default 1.0)")
    serving.add_argument("--baselines", choices=("all", "huggingface", "none"), default="all", help="(default all)")
    serving.add_argument("--quick", action="store_true", help="a minute, to see that it works; into build/results")
    serving.add_argument("--results", type=Path, help="folder to write to (default docs/results)")
    server = parser.add_argument_group("server")
    server.add_argument("--connections", type=int, nargs="+", help="(default 1 2 4 8 16 32 64)")
    server.add_argument("--duration", type=float, help="seconds in all (default 60)")
    server.add_argument("--method", choices=tuple(METHODS), default="mtad", help="(default %(default)s)")
    server.add_argument("--rows", type=int, default=16, help="requests decoded at once (default %(default)s)")
    options = parser.parse_args()
    if options.what == "server":
        from scripts.server_load import run as run_server

        run_server(options)
        return
    if options.what == "serving":
        from scripts.serving import run

        run(options)
        return
    for name, least in (("sql", 2), ("code", 2), ("blocks", 4)):
        if getattr(options, name) < least:
            raise InvalidInput(name, getattr(options, name), f"give at least {least}")
    if options.what == "overhead" and options.device != "cpu":
        problem = "a GPU runs a block as a whole, so its steps cannot be timed; give cpu"
        raise InvalidInput("device", options.device, problem)
    torch.set_num_threads(1)
    llm = LLM(options.pair, **placement_of(options))
    count = {"sql": options.sql, "code": options.code}
    found: dict[str, Any] = {"command": "python -m scripts.bench " + " ".join(sys.argv[1:])}
    if options.what == "tune":
        found |= tune(llm, count)
    if options.what == "overhead":
        found["overhead"] = measure_overhead(llm, options.blocks)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
