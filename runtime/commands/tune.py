"""`mtad tune`: the decoding parameters of a pair, chosen on prompts of yours and written into its `pair.json`."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtad import __version__
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.commands.entry import Parser, add_placement, command, json_object, placed_config
from runtime.config import RuntimeConfig, check_least, use_torch

if TYPE_CHECKING:
    from runtime.tuning.measure import Point
    from runtime.tuning.search import Decision, Tuning

TRIED = ("block", "traversal", "mtad", "mmtad_sample")
"""Methods that are tried if none are given: the lossless ones first."""
PAUSE = 30.0
"""Seconds between two lines about progress, where there is no terminal."""


@command
def main() -> None:
    """Entry point of `mtad tune`."""
    parser = Parser(
        prog="mtad tune",
        usage="%(prog)s PAIR --prompts FILE [options]",
        description="Choose method, draft length, beam width, acceptance threshold and temperature of a pair on your "
        "own prompts, print what was measured, and make the choice the pair's default. Goal speed: the most tokens/s "
        "within the bounds on quality; goal quality: the best text within the bound on speed. Do not report results on "
        "the same prompts. With --estimate: what drafts would gain, from two checkpoints alone.",
    )
    parser.add_argument("pair", type=Path, nargs="?", help="pair folder, written by mtad export")
    parser.add_argument(
        "--prompts", type=Path, required=True, help='JSON lines with "prompt" and optionally "answer" (the exact text)'
    )
    parser.add_argument(
        "--method", default=",".join(TRIED), help="methods to try, in this order, separated by commas (%(default)s)"
    )
    parser.add_argument("--goal", default="speed", help="speed or quality (default %(default)s)")
    bounds = (
        ("max-perplexity", 1.0, "goal speed: highest perplexity, as a multiple of sample's"),
        ("accuracy-loss", 0.0, "goal speed: largest loss of accuracy against sample, if answers are given"),
        ("min-speed", 1.0, "goal quality: lowest tokens/s, as a multiple of speculative's"),
        ("min-distinct", 0.0, "lowest distinct-2, as a multiple of sample's, to bound repetition"),
    )
    for name, default, text in bounds:
        parser.add_argument(f"--{name}", type=float, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--search", default="coordinate", help="coordinate or grid (default %(default)s)")
    for name in ("draft-len", "beam-width", "accept-threshold", "draft-confidence"):
        parser.add_argument(f"--{name}", help="values to try, separated by commas")
    parser.add_argument(
        "--temperature", help="values to try; by default several if answers are given or --min-distinct, else none"
    )
    parser.add_argument(
        "--params", type=json_object, default={}, help="all other decoding parameters, as a JSON object"
    )
    parser.add_argument("--limit", type=int, help="use the first prompts only")
    parser.add_argument("--seeds", type=int, default=1, help="texts per prompt (default %(default)s)")
    add_placement(parser)
    parser.add_argument("--estimate", action="store_true", help="estimate the gain of two checkpoints instead")
    for name in ("target", "auxiliary"):
        parser.add_argument(f"--{name}", help=f"--estimate: the {name}'s checkpoint, as for mtad export")
    parser.add_argument(
        "--auxiliary-cost", type=float, help="--estimate: an auxiliary's step, as a share of a target's (else measured)"
    )
    parser.add_argument(
        "--token-cost", type=float, help="--estimate: each further token that the target scores, likewise"
    )
    parser.add_argument("--dry-run", action="store_true", help="leave pair.json as it is")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()

    methods = options.method.split(",")
    for method in methods:
        DecodingParams.from_dict({"method": method})
    check_least(options, limit=1, seeds=1)
    given = options.params
    for name in ("method", "seed", "n", "draft_len", "beam_width", "accept_threshold", "draft_confidence"):
        if name in given:
            raise InvalidInput("params", name, "cannot be set in --params; see mtad tune --help")
    DecodingParams.from_dict(given)
    if options.estimate:
        from runtime.commands.tune_estimate import run

        run(options, given)
        return
    if options.pair is None:
        raise InvalidInput("pair", None, "give the pair's folder, or --estimate with two checkpoints")

    from engines.prompts import read_prompts
    from runtime.tuning.search import GRID, TEMPERATURES, Decision, Objective, describe, grid_of, join, judge, tune

    grids = {  # what the user gives, else the method's own
        method: {name: _values(name, getattr(options, name)) or own for name, own in grid_of(METHODS[method]).items()}
        for method in methods
    }
    for method, grid in grids.items():
        if not grid:
            raise InvalidInput("method", method, "it has nothing to tune")
    for name in GRID:
        if getattr(options, name) and not any(name in grid for grid in grids.values()):
            raise InvalidInput(name, getattr(options, name), f"{options.method} does not use it")
    bound = {name: getattr(options, name) for name in ("max_perplexity", "accuracy_loss", "min_speed", "min_distinct")}
    for name, grid in itertools.product(("draft_len", "beam_width"), grids.values()):
        most = getattr(RuntimeConfig, f"max_{name}")
        if name in grid and max(grid[name]) > most:
            problem = f"give at most {most}: the choice becomes a default, and engines open for drafts up to that"
            raise InvalidInput(name, getattr(options, name), problem)
    objective = Objective(options.goal, **bound)
    if options.search not in ("coordinate", "grid"):
        raise InvalidInput("search", options.search, "give coordinate or grid")
    examples = read_prompts(options.prompts)[: options.limit]
    if len(examples) < 2:
        raise InvalidInput("prompts", str(options.prompts), "give at least two prompts")
    known = examples[0].answer is not None
    if options.temperature or known or options.min_distinct:
        for grid in grids.values():
            grid["temperature"] = _values("temperature", options.temperature) or TEMPERATURES

    from tqdm import tqdm

    from engines.folder import exported_defaults, read_json
    from runtime.llm import LLM
    from runtime.pair import write_tuning

    exported = exported_defaults(read_json(options.pair, "pair.json"))  # what the choice will lie over
    bases = {method: DecodingParams.from_dict({**exported, **given, "method": method}) for method in methods}
    for method, grid in grids.items():
        for setting in itertools.product(*grid.values()):
            replace(bases[method], **dict(zip(grid, setting, strict=True)))  # refuses what is no value of the method
    use_torch()
    llm = LLM(options.pair, placed_config(options, prefix_tokens=0))
    prompts = [example.prompt for example in examples]
    verdict = Decision(False, "no setting keeps the bounds")
    said = time.monotonic()
    with tqdm(desc="tuning", unit="answer", file=sys.stderr, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            nonlocal said
            bar.total = total
            bar.update(done - bar.n)
            if bar.disable and (done == total or time.monotonic() > said + PAUSE):  # a log file gets lines
                said = time.monotonic()
                print(f"tuning: {done} of {total} answers of this sweep", file=sys.stderr, flush=True)

        def right(number: int, text: str) -> bool | None:
            return examples[number].right(text)

        searches = {}
        for method, base in bases.items():
            bar.set_description(f"tuning {method}")
            bar.reset()
            found = tune(llm, prompts, base, objective, grids[method], options.search, options.seeds, right, progress)
            searches[method] = found
        found = join(searches, objective)
        values = found.choice.values
        now, choice = llm.pair.defaults, replace(bases[values["method"]], **values)
        if found.fits:
            verdict = judge(llm, prompts, now, choice, objective, options.seeds, right, progress)
    report = {
        "method": values["method"],
        **describe(found, objective),
        "changed": verdict.change,
        "reason": verdict.reason,
        "search": options.search,
        "prompts": {"sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest(), "count": len(examples)},
        "seeds": options.seeds,
        "params": given,
        "versions": {"mtad": __version__},
    }
    print(json.dumps(report) if options.json else curve(found))
    if not found.fits:
        problem = f"no setting meets the bounds of goal {options.goal}; the nearest one is {values}"
        raise InvalidInput("goal", options.goal, f"{problem}. pair.json is unchanged; widen a bound")
    if verdict.change and not options.dry_run:
        write_tuning(options.pair, {**given, **values}, report)
    if not (choice.spec.lossless or known):
        print(
            f"warning: {choice.method} does not keep the target's distribution, and prompts without answers do not "
            "show whether its texts are right as often; give answers, or --method block",
            file=sys.stderr,
        )
    if not options.json:
        print(f"\n{_conclusion(now, choice, verdict, options.dry_run)}")


def _conclusion(now: DecodingParams, choice: DecodingParams, verdict: Decision, dry_run: bool) -> str:
    """The last line: what has become of the pair's default, in the parameters that differ."""
    before, after = (
        {**asdict(p), "accept_threshold": p.threshold, "draft_confidence": p.confidence} for p in (now, choice)
    )
    names = [name for name in after if name == "method" or before[name] != after[name]]
    a, b = (" ".join(f"{name}={values[name]}" for name in names) for values in (before, after))
    if not verdict.change:
        return f"{'would keep' if dry_run else 'kept'} {a}: {verdict.reason}"
    return f"{'would change' if dry_run else 'changed'} {a} to {b}: {verdict.reason}"


def curve(found: Tuning) -> str:
    """All points of a search as a table; the chosen one is marked."""
    names = list(dict.fromkeys(name for point in found.points for name in point.values))
    heads = [*names, "tokens/s", "x sample", "x speculative", "perplexity", "x sample", "accuracy %", "distinct-2"]
    lines = [[*heads, "tokens per pass", ""]]
    for point in sorted(found.points, key=_order):
        accuracy = "-"
        if point.accuracy is not None:
            accuracy = f"{point.accuracy:.1%} ({point.accuracy_gain:+.1%} ±{point.accuracy_gain_error:.1%})"
        lines.append(
            [
                *(_shown(point.values.get(name)) for name in names),
                f"{point.tokens_per_second:.0f}",
                f"{point.speed:.2f} ±{point.speed_error:.2f}",
                f"{point.speed_vs_speculative:.2f}",
                f"{point.perplexity:.2f}",
                f"{point.perplexity_ratio:.3f} ±{point.perplexity_ratio_error:.3f}",
                accuracy,
                f"{point.distinct_2:.2f}",
                f"{point.block_efficiency:.2f}",
                "<- chosen" if point is found.choice else "",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _order(point: Point) -> tuple[str, tuple[float, ...]]:
    """Points of one method together, and in the order of their values."""
    numbers = (value for name, value in point.values.items() if name != "method")
    return point.values.get("method", ""), tuple(numbers)


def _shown(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:g}"


def _values(name: str, text: str | None) -> tuple[Any, ...]:
    if text is None:
        return ()
    kind = int if name in ("draft_len", "beam_width") else float
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(name, text, "give numbers separated by commas") from None
    if len(set(found)) < len(found):
        raise InvalidInput(name, text, "a value is given twice")
    return found
