"""Measure the runtime on the demo pair.

    python -m scripts.bench overhead    what of a block is spent outside the two engines' `step`: milliseconds and share
    python -m scripts.bench vocabulary  the same of random models with 128,256 tokens, by method and filter
    python -m scripts.bench precision   what OpenVINO's precisions cost, target and auxiliary apart
    python -m scripts.bench serving     throughput and latency under load, against outside baselines
    python -m scripts.bench server      the HTTP server under load, against plain AsyncLLM
    python -m scripts.bench peers       tokens per second against other libraries, each in an environment of its own
    python -m scripts.bench steps       how the cost of an engine's step grows

`mtad bench` is the same command. `peers` and `steps` have options of their own: `mtad bench peers --help`.

`python -m scripts.evaluation` compares methods. `overhead` times single blocks of 1 and 8 rows, after prompts of 100
and of 500 tokens, methods interleaved, and reports medians.

Prints tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from engines.folder import read_spec
from engines.placement import cores
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from runtime import LLM
from runtime.commands.entry import Parser, add_placement, command, placed_config
from scripts.bench.methods import KINDS, methods
from scripts.bench.overhead import measure_overhead
from scripts.bench.precision import run as run_precision
from scripts.bench.vocabulary import MIN_VOCABULARY, settings, vocabulary_pair
from scripts.demo import dataset
from scripts.paths import ROOT


@command
def main() -> None:
    if sys.argv[1:2] == ["peers"]:
        from scripts.bench.peers.compare import run as run_peers

        run_peers(sys.argv[2:])
        return
    if sys.argv[1:2] == ["steps"]:
        from scripts.bench.steps import run as run_steps

        run_steps(sys.argv[2:])
        return
    parser = Parser(prog="scripts.bench", description="Measure the decoding methods on the demo pair.")
    names = ("overhead", "vocabulary", "precision", "serving", "server", "peers", "steps")
    parser.add_argument("what", choices=names)
    parser.add_argument(
        "--pair", type=Path, default=ROOT / "build" / "demo-pair", help="pair folder (default %(default)s)"
    )
    parser.add_argument("--sql", type=int, default=300, help="SQL questions (default %(default)s)")
    parser.add_argument("--code", type=int, default=80, help="code prompts (default %(default)s)")
    parser.add_argument(
        "--blocks", type=int, default=60, help="blocks timed by overhead and vocabulary (default %(default)s)"
    )
    parser.add_argument(
        "--quantized", type=Path, nargs="+", default=[], help="the same pair exported as int8 and int4, for precision"
    )
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
    vocabulary = parser.add_argument_group("vocabulary")
    vocabulary.add_argument("--size", type=int, default=128_256, help="of the vocabulary (default %(default)s)")
    vocabulary.add_argument(
        "--methods",
        nargs="+",
        choices=tuple(METHODS),
        default=["sample", "speculative", "mtad", "mmtad", "mmtad_sample"],
        help="(default %(default)s)",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--connections", type=int, nargs="+", help="(default 1 2 4 8 16 32 64)")
    server.add_argument("--duration", type=float, help="seconds in all (default 60)")
    server.add_argument("--method", choices=tuple(METHODS), default="mtad", help="(default %(default)s)")
    server.add_argument("--rows", type=int, default=16, help="requests decoded at once (default %(default)s)")
    options = parser.parse_args()
    if options.what == "server":
        from scripts.bench.server_load import run as run_server

        run_server(options)
        return
    if options.what == "serving":
        from scripts.bench.serving import run

        run(options)
        return
    for name, least in (("sql", 2), ("code", 2), ("blocks", 4)):
        if getattr(options, name) < least:
            raise InvalidInput(name, getattr(options, name), f"give at least {least}")
    if options.what in ("overhead", "vocabulary") and options.device != "cpu":
        problem = "a GPU runs a block as a whole, so its steps cannot be timed; give cpu"
        raise InvalidInput("device", options.device, problem)
    torch.set_num_threads(1)
    if options.what == "precision":
        given = [options.pair, *options.quantized]
        folders = {read_spec(folder / "target").precision: folder for folder in given}
        counts = {"sql": options.sql, "code": options.code}
        print(json.dumps(run_precision(folders, options.threads or cores(), counts)))
        return
    if options.what == "vocabulary":
        if options.size < MIN_VOCABULARY:
            raise InvalidInput("size", options.size, f"give at least {MIN_VOCABULARY}")
        options.pair = vocabulary_pair(ROOT / "build" / f"vocabulary-{options.size}", options.size)
    llm = LLM(options.pair, placed_config(options))
    print(llm.pair.runs_on)
    found: dict[str, Any] = {"command": "python -m scripts.bench " + " ".join(sys.argv[1:])}
    if options.what == "overhead":
        compared = {name: params for name, params in methods("sql").items() if name != "greedy"}
        text = "\n".join(example.prompt for example in dataset.load("test", "code"))
        tokens = llm.pair.tokenizer(text).input_ids
        found["overhead"] = measure_overhead(llm, options.blocks, compared, tokens, (100, 500))
    if options.what == "vocabulary":
        tokens = [1 + number % 1000 for number in range(4000)]
        found["vocabulary"] = measure_overhead(llm, options.blocks, settings(options.methods), tokens, (100,))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
