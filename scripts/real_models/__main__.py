"""Real checkpoints on one GPU: tokens per second and right answers, beside other libraries (docs/real-models.md).

    python -m scripts.real_models --pairs qwen3 llama3 coder --data FOLDER     all of it
    python -m scripts.real_models --pairs demo --quick                         a minute, to see that it works

Each pair is exported, each system is a server with OpenAI's API, and a fixed number of requests is in flight. Systems
answer all questions of a benchmark at the last load, which says how many are right; at the others, the first ones.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import urllib.request
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from export.options import ExportOptions
from mtad.errors import Failed, InvalidInput
from runtime.commands.entry import Parser, command
from scripts.clients.served import started
from scripts.paths import RESULTS, ROOT
from scripts.real_models.benchmarks import READERS, Question, load
from scripts.real_models.systems import PAIRS, Pair, ours, peers
from scripts.results import Rows

START_SECONDS = 1800.0
"""A server that loads a checkpoint for the first time downloads it."""


def parser() -> Parser:
    own = Parser(prog="scripts.real_models", description="Speed and right answers of pairs of real checkpoints.")
    add = own.add_argument
    add("--pairs", nargs="+", choices=PAIRS, default=[name for name in PAIRS if name != "demo"])
    add("--benchmarks", nargs="+", help="(default: all published ones; of the demo pair, its own)")
    add("--data", type=Path, help="folder with the benchmarks' files")
    add("--loads", nargs="+", type=int, default=[1, 8, 32], help="requests in flight (default %(default)s)")
    add("--timed", type=int, default=40, help="questions of each benchmark but at the last load (default %(default)s)")
    add("--tokens", type=int, default=512, help="of an answer at most (default %(default)s)")
    add("--temperature", type=float, default=0.6, help="of all systems (default %(default)s)")
    add("--device", default="cuda", help="cpu exports ONNX in float32, cuda PyTorch in bfloat16 (default %(default)s)")
    add("--no-peers", action="store_true", help="this toolkit's methods alone")
    add("--quick", action="store_true", help="few questions, this toolkit alone, on a CPU, into build/results")
    add("--results", type=Path, help="folder to write to (default docs/results)")
    return own


@command
def main() -> None:
    from scripts.results import save, table

    options = parser().parse_args()
    if min(*options.loads, options.timed, options.tokens) < 1:
        raise InvalidInput("loads", options.loads, "give at least 1, as of --timed and --tokens")
    if options.quick:
        options.loads, options.timed, options.tokens, options.device, options.no_peers = [1, 4], 4, 24, "cpu", True
    figures = run(options)
    folder = options.results or (ROOT / "build" / "results" if options.quick else RESULTS)
    save(folder / "real-models.json", "scripts.real_models.__main__", figures)
    for name, rows in tables(figures).items():
        print(f"\n{name}\n\n{table(rows)}")
    print(f"\nwritten to {folder / 'real-models.json'}")


def run(options: Namespace) -> dict[str, Any]:
    """The figures, as docs/real-models.md describes them.

    Raises:
        InvalidInput: a benchmark's file is missing; nothing was measured.
        Failed: a server does not start or answer.
    """
    sets = {}
    for name in options.pairs:
        chosen = options.benchmarks or (["demo"] if name == "demo" else list(READERS))
        sets[name] = {benchmark: load(benchmark, options.data) for benchmark in chosen}
        if options.quick:
            sets[name] = {benchmark: questions[: options.timed] for benchmark, questions in sets[name].items()}
    settings = {key: getattr(options, key) for key in ("loads", "timed", "tokens", "temperature", "device")}
    return {"settings": settings, "pairs": {name: measure(name, PAIRS[name], sets[name], options) for name in sets}}


def measure(name: str, pair: Pair, sets: Mapping[str, Sequence[Question]], options: Namespace) -> dict[str, Any]:
    """One pair: what its export took, and each system's answers by benchmark and load."""
    from export.pair import export_pair

    folder, rows, began = ROOT / "build" / "real-models" / name, max(options.loads), time.monotonic()
    form = ("torch", "bfloat16") if options.device.startswith("cuda") else ("onnx", "float32")
    asked = ExportOptions(pair.target, pair.auxiliary, rows=rows, format=form[0], precision=form[1])
    export_pair(folder, asked, overwrite=True, progress=lambda stage: print(f"{name}: {stage}", file=sys.stderr))
    seconds, systems = time.monotonic() - began, ours(folder, rows, options.device)
    found: dict[str, Any] = {}
    for server, sharing in groupby([*systems, *([] if options.no_peers else peers(pair))], lambda one: one.command):
        own = server in {system.command for system in systems}
        with started(server, START_SECONDS, ends_cleanly=own) as (url, _):
            for system in sharing:
                body = {"model": "model", "max_tokens": options.tokens, "temperature": options.temperature}
                body |= {**pair.fields, **system.fields}
                found[system.name] = {
                    benchmark: {str(n): answered(url, pair, questions, body, n, options) for n in options.loads}
                    for benchmark, questions in sets.items()
                }
                print(f"{name}: {system.name} has answered", file=sys.stderr)
    return {"export_seconds": seconds, "precision": form[1], "systems": found}


def answered(
    url: str, pair: Pair, questions: Sequence[Question], body: Mapping[str, Any], load: int, options: Namespace
) -> dict[str, Any]:
    """Answers to questions, so many in flight: tokens per second, and the share that is right, with its error."""
    asked = questions if load == options.loads[-1] else questions[: options.timed]

    def ask(number: int) -> tuple[str, int]:
        prompt, path = asked[number].prompt, "/v1/chat/completions" if pair.chat else "/v1/completions"
        own = {"messages": [{"role": "user", "content": prompt}]} if pair.chat else {"prompt": prompt}
        data = json.dumps({**body, **own, "seed": number}).encode()
        request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=3600) as answer:
                found = json.load(answer)
        except OSError as error:
            raise Failed(f"{path} of {url}: {error}") from error
        choice = found["choices"][0]
        return choice["message"]["content"] or "" if pair.chat else choice["text"], found["usage"]["completion_tokens"]

    with ThreadPoolExecutor(load) as pool:
        list(pool.map(ask, range(min(load, len(asked)))))  # warm
        began = time.perf_counter()
        texts = list(pool.map(ask, range(len(asked))))
        seconds = time.perf_counter() - began
    right = [float(one.right(text)) for one, (text, _) in zip(asked, texts, strict=True) if one.right is not None]
    mean = statistics.fmean(right) if right else None
    return {
        "questions": len(asked),
        "tokens": sum(tokens for _, tokens in texts),
        "seconds": seconds,
        "tokens_per_second": sum(tokens for _, tokens in texts) / seconds,
        "right": mean,
        "error": None if mean is None else math.sqrt(mean * (1 - mean) / len(right)),
    }


def tables(figures: Mapping[str, Any]) -> dict[str, Rows]:
    """Tokens per second by load, and right answers, of each pair."""
    found: dict[str, Rows] = {}
    for name, pair in figures["pairs"].items():
        loads = figures["settings"]["loads"]
        lines = [["system", "benchmark", *(f"tokens/s, {load} in flight" for load in loads), "right"]]
        for system, benchmarks in pair["systems"].items():
            for benchmark, by_load in benchmarks.items():
                last = by_load[str(loads[-1])]
                share = "-" if last["right"] is None else f"{last['right']:.1%} ± {last['error']:.1%}"
                rates = (f"{by_load[str(load)]['tokens_per_second']:.0f}" for load in loads)
                lines.append([system, benchmark, *rates, share])
        found[name] = lines
    return found


if __name__ == "__main__":
    main()
