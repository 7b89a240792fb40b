"""`mtad tune`: the fastest decoding parameters of a pair that keep the quality of its texts, found on your prompts."""

from __future__ import annotations

import itertools
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

from engines.prompts import read_prompts
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.commands.entry import PLACEMENT, Parser, add_options, command, given_options, json_object
from runtime.config import RuntimeConfig, check_least, use_torch

TOKENS = 128
"""Of an answer at most, unless the pair or --params say otherwise."""


@command
def main() -> None:
    """Entry point of `mtad tune`."""
    about = """Find the method, draft length, beam width, acceptance threshold and draft confidence that give the most
    tokens/s on your prompts and keep the quality of the texts, print what was measured, and make them the pair's
    default. Do not report results on the same prompts."""
    parser = Parser(prog="mtad tune", usage="%(prog)s PAIR --prompts FILE [options]", description=about)
    parser.add_argument("pair", type=Path, help="pair folder, written by mtad export")
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines: "prompt", perhaps "answer"')
    methods = "block,traversal,budget,mtad"
    parser.add_argument("--method", default=methods, help="methods to try, separated by commas (default %(default)s)")
    loss = """how much worse than sample's the texts of a lossy method may be: in accuracy if answers are given,
    otherwise in perplexity and in distinct-2; 0.05 allows 5 %% (default %(default)s)"""
    parser.add_argument("--quality-loss", type=float, default=0.0, help=loss)
    parser.add_argument("--params", type=json_object, default={}, help="other decoding parameters, as a JSON object")
    add_options(parser, RuntimeConfig, PLACEMENT)
    parser.add_argument("--dry-run", action="store_true", help="leave pair.json as it is")
    options = parser.parse_args()
    check_least(options, quality_loss=0)
    DecodingParams.from_dict(options.params)
    examples = read_prompts(options.prompts)
    if len(examples) < 4:
        raise InvalidInput("prompts", str(options.prompts), "give at least four prompts")
    random.Random(0).shuffle(examples)  # a file may be in an order; one half is searched with, the other compared

    from runtime.llm import LLM
    from runtime.pair import read_description, write_tuning
    from runtime.tuning.search import GRID, decide, grid_of, search, setting_of, table

    given, allowed = options.params, options.quality_loss
    for name in ("method", "seed", "n", *GRID):
        if name in given:
            raise InvalidInput("params", name, "cannot be set in --params; see mtad tune --help")
    exported = read_description(options.pair)["defaults"]  # what the choice will lie over
    shared = {"max_tokens": TOKENS, **exported, **given}
    bases = [DecodingParams.from_dict({**shared, "method": name}) for name in options.method.split(",")]
    for base in bases:
        if not grid_of(base.method):
            raise InvalidInput("method", base.method, "it has nothing to tune")
    if not options.dry_run and not os.access(options.pair, os.W_OK):
        raise InvalidInput("pair", str(options.pair), "cannot be written; give --dry-run")
    use_torch()
    llm = LLM(options.pair, RuntimeConfig(prefix_tokens=0, **given_options(options, RuntimeConfig)))
    for base, example in itertools.product(bases, examples):
        largest = replace(base, draft_len=llm.config.max_draft_len, beam_width=max(GRID["beam_width"]))
        for params in (largest, replace(base, **setting_of(llm.pair.defaults))):
            llm.requests(example.prompt, params)  # refuses what does not fit
    tried = sum(sum(map(len, grid_of(base.method).values())) for base in bases)
    work = f"about {tried * len(examples)} answers of up to {bases[0].max_tokens} tokens, one at a time"
    print(f"{work}; the bars say how long each search takes", file=sys.stderr)
    searched = [search(llm, examples[::2], base, allowed) for base in bases]
    print(table([point for points in searched for point in points]))
    settings = [setting_of(llm.pair.defaults)]
    settings += [points[0].values for points in searched if points[0].quality_loss <= allowed]
    compared, choice, reason = decide(llm, examples[1::2], bases[0], settings, allowed)
    print("\nThe present default and the best setting of each method, on the other half of the prompts:\n")
    print(table(compared), end="\n\n")
    changed = choice is not compared[0]
    if changed and not options.dry_run:
        figures = [{**point.values, **point.figures} for points in (*searched, compared) for point in points]
        report = {"quality_loss": allowed, "prompts": len(examples), "figures": figures}
        write_tuning(options.pair, {**given, **choice.values}, report)
    done = ("would keep", "would change to") if options.dry_run else ("kept", "changed to")
    words = " ".join(f"{name}={value}" for name, value in choice.values.items())
    print(f"{done[changed]} {words}: {reason}")
