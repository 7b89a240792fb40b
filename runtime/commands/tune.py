"""`mtad tune`: the fastest decoding parameters of a pair that keep the quality of its texts, found on your prompts."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engines.prompts import Example, read_prompts
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.commands.entry import PLACEMENT, Parser, add_options, command, given_options, json_object
from runtime.config import RuntimeConfig, check_least, use_torch

TOKENS = 128
"""Of an answer at most, unless the pair or --params say otherwise."""


@command
def main() -> None:
    """Entry point of `mtad tune`."""
    parser = Parser(
        prog="mtad tune",
        usage="%(prog)s PAIR --prompts FILE [options]",
        description="Find the method, draft length, beam width, acceptance threshold and draft confidence that give "
        "the most tokens/s on your prompts and keep the quality of the texts, print what was measured, and make them "
        "the pair's default. Do not report results on the same prompts. With --estimate: what drafts would gain, from "
        "two checkpoints alone.",
    )
    parser.add_argument("pair", type=Path, nargs="?", help="pair folder, written by mtad export")
    parser.add_argument(
        "--prompts", type=Path, required=True, help='JSON lines with "prompt" and optionally "answer" (the exact text)'
    )
    parser.add_argument(
        "--method",
        default="block,traversal,mtad,mmtad_sample",
        help="methods to try, separated by commas (default %(default)s)",
    )
    parser.add_argument(
        "--quality-loss",
        type=float,
        default=0.0,
        help="how much worse than sample's the texts of a lossy method may be: in accuracy if answers are given, "
        "otherwise in perplexity and in distinct-2; 0.05 allows 5 %% (default %(default)s)",
    )
    parser.add_argument("--params", type=json_object, default={}, help="other decoding parameters, as a JSON object")
    add_options(parser, RuntimeConfig, PLACEMENT)
    parser.add_argument("--dry-run", action="store_true", help="leave pair.json as it is")
    parser.add_argument("--estimate", action="store_true", help="estimate the gain of two checkpoints instead")
    for name in ("target", "auxiliary"):
        parser.add_argument(f"--{name}", help=f"--estimate: the {name}'s checkpoint, as for mtad export")
    options = parser.parse_args()
    check_least(options, quality_loss=0)
    for name in ("target", "auxiliary") if options.estimate else ("pair",):
        if getattr(options, name) is None:
            raise InvalidInput(name, None, "give a pair folder, or --estimate with --target and --auxiliary")
    DecodingParams.from_dict(options.params)
    examples = read_prompts(options.prompts)
    if len(examples) < 2:
        raise InvalidInput("prompts", str(options.prompts), "give at least two prompts")
    if options.estimate:
        _estimate(options, examples)
    else:
        _tune(options, examples)


def _estimate(options: argparse.Namespace, examples: Sequence[Example]) -> None:
    params = DecodingParams.from_dict(options.params)
    if params.temperature == 0:
        raise InvalidInput("params temperature", 0, "the estimate is for sampling; give a temperature above 0")
    use_torch()
    import torch

    from engines.folder import vocabulary_hash
    from export.checkpoint.checkpoint import find
    from runtime.tuning.estimate import acceptance_rates, expected_passes, texts_to_read

    checkpoints = find("target", options.target), find("auxiliary", options.auxiliary)
    target, auxiliary = (checkpoint.tokenizer() for checkpoint in checkpoints)
    if vocabulary_hash(target.get_vocab()) != vocabulary_hash(auxiliary.get_vocab()):
        raise InvalidInput("auxiliary", options.auxiliary, "its vocabulary is not the target's")
    texts = texts_to_read(target, examples)
    rates = acceptance_rates([checkpoint.load(torch.float32) for checkpoint in checkpoints], texts, params)
    positions = sum(map(len, rates))
    error = statistics.stdev(own.mean() for own in rates) / len(rates) ** 0.5
    print(
        f"{len(rates)} texts, {positions} positions; a drafted token is accepted with probability "
        f"{sum(own.sum() for own in rates) / positions:.3f} ± {error:.3f}\n"
        "a draft pays where a step of the auxiliary costs less than this share of a step of the target\n"
        "(and the target scores a draft as fast as a single token):\n\ndraft_len  tokens per pass  share"
    )
    for draft_len in range(1, 9):
        tokens = positions / sum(expected_passes(own, draft_len) for own in rates)
        print(f"{draft_len:9}  {tokens:15.2f}  {(tokens - 1) / draft_len:5.2f}")


def _tune(options: argparse.Namespace, examples: Sequence[Example]) -> None:
    from engines.folder import exported_defaults, read_json
    from runtime.llm import LLM
    from runtime.pair import write_tuning
    from runtime.tuning.search import GRID, decide, grid_of, search, setting_of, table

    given, allowed = options.params, options.quality_loss
    for name in ("method", "seed", "n", *GRID):
        if name in given:
            raise InvalidInput("params", name, "cannot be set in --params; see mtad tune --help")
    exported = exported_defaults(read_json(options.pair, "pair.json"))  # what the choice will lie over
    bases = [
        DecodingParams.from_dict({"max_tokens": TOKENS, **exported, **given, "method": name})
        for name in options.method.split(",")
    ]
    for base in bases:
        if not grid_of(base.method):
            raise InvalidInput("method", base.method, "it has nothing to tune")
    use_torch()
    llm = LLM(options.pair, RuntimeConfig(prefix_tokens=0, **given_options(options, RuntimeConfig)))
    for base, example in itertools.product(bases, examples):
        largest = replace(base, draft_len=llm.config.max_draft_len, beam_width=max(GRID["beam_width"]))
        llm.requests(example.prompt, largest)  # refuses what does not fit
    searched = [search(llm, examples, base, allowed) for base in bases]
    print(table([point for points in searched for point in points]))
    settings = [setting_of(llm.pair.defaults)]
    settings += [points[0].values for points in searched if points[0].quality_loss <= allowed]
    compared, choice, reason = decide(llm, examples, bases[0], settings, allowed)
    print(f"\nThe present default and the best setting of each method, on other texts:\n\n{table(compared)}\n")
    changed = choice is not compared[0]
    if changed and not options.dry_run:
        figures = [{**point.values, **point.figures} for points in (*searched, compared) for point in points]
        report = {"quality_loss": allowed, "prompts": len(examples), "figures": figures}
        write_tuning(options.pair, {**given, **choice.values}, report)
    done = ("would keep", "would change to") if options.dry_run else ("kept", "changed to")
    words = " ".join(f"{name}={value}" for name, value in choice.values.items())
    print(f"{done[changed]} {words}: {reason}")
