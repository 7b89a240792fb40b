"""The command line: which prompts, which settings, what is written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engines.folder import read_json, read_spec
from engines.quiet import quiet_transformers
from mtad.errors import CapacityExceeded, InvalidInput
from mtad.params import DecodingParams
from runtime import LLM
from runtime.commands.entry import Parser, add_placement, placed_config
from scripts.demo.dataset import SIZES
from scripts.energy import EnergyMeter
from scripts.evaluation import curves, gain, report
from scripts.evaluation.baselines import SEARCHES, check_baseline, check_checkpoints, open_baselines, parse_searches
from scripts.evaluation.curves import Curve
from scripts.evaluation.decoders import Decoder, Ids, Ours
from scripts.evaluation.figures import REFERENCES, summarise
from scripts.evaluation.measure import measure, score
from scripts.evaluation.prompt_set import PromptSet
from scripts.evaluation.prompts import open_sets
from scripts.evaluation.settings import TABLE, Asked, parse, resolve, undrafted
from scripts.evaluation.store import Store
from scripts.machine import machine
from scripts.paths import DEMO, ROOT


def parser() -> Parser:
    own = Parser(
        prog="scripts.evaluation",
        description="Decoding methods side by side on sets of prompts.",
        epilog=f"sets: sql, code, spider=FOLDER, humaneval=FILE, jsonl=FILE; settings: {', '.join(TABLE)}, each "
        "perhaps with changes, as in mtad:accept_threshold=0.3:beam_width=2",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    own.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="pair folder")
    own.add_argument("--set", default="sql,code", help="sets of prompts, separated by commas")
    own.add_argument("--split", choices=tuple(SIZES), default="test", help="of the demo's sets")
    own.add_argument("--methods", help="settings, separated by commas (default: all)")
    own.add_argument("--baselines", default="all", help=f"all, none, or some of {', '.join(SEARCHES)}")
    own.add_argument(
        "--checkpoints",
        type=Path,
        default=DEMO / "pair",
        help="the pair's checkpoints, for the baselines: folder with target/ and auxiliary/",
    )
    own.add_argument("--params", default="{}", help="decoding parameters of all settings, as a JSON object")
    own.add_argument("--limit", type=int, help="prompts of each set (default: all)")
    own.add_argument("--seeds", type=int, default=1, help="how many answers to each prompt")
    own.add_argument("--batch", type=int, default=1, help="prompts decoded at once")
    own.add_argument(
        "--timed", type=int, help="time this many prompts of each set, each decoded alone; --batch is for the others"
    )
    own.add_argument("--pass-k", default="1,10,100", help="k of pass@k, as far as there are as many seeds")
    own.add_argument(
        "--gain", action="store_true", help="add the lossless temperature curves, and say what is gained beyond them"
    )
    own.add_argument("--answers", type=Path, help="file that keeps all answers; a run that was broken off goes on")
    own.add_argument("--curve", action="append", default=[], metavar="PARAMETER=VALUES", help="may be repeated")
    add_placement(own)
    own.add_argument("--results", type=Path, default=ROOT / "build" / "results", help="folder to write to")
    own.add_argument("--name", help="of the files written (default: evaluation, or curves)")
    return own


@dataclass(frozen=True)
class Task:
    """A set of prompts as the settings get it."""

    prompts: PromptSet
    ids: list[Ids]
    params: dict[str, DecodingParams]
    left_out: list[str]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print and write; returns what was written.

    Raises:
        InvalidInput: an option is not usable; nothing was measured.
    """
    command = "python -m scripts.evaluation " + " ".join(sys.argv[1:])
    return _write({"command": command, **compare(options)}, options)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print; returns what JSON may hold.

    Raises:
        InvalidInput: an option is not usable; nothing was measured.
    """
    for name in ("seeds", "batch", "timed"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise InvalidInput(name, getattr(options, name), "give at least 1")
    ks = _integers("pass-k", options.pass_k)
    drawn = [Curve.of(text) for text in options.curve]
    asked = parse(options.methods.split(",")) if options.methods else None
    if options.gain and drawn:
        raise InvalidInput("gain", "with --curve", "give one of them")
    chosen, measured = curves.settings(asked, drawn) if drawn else ([], asked or parse(list(TABLE)))
    measured += parse(gain.curve_settings()) if options.gain else []
    if len({one.label for one in measured}) < len(measured):
        raise InvalidInput("methods", options.methods, "--gain adds the points of the curves; leave them out")
    labels = parse_searches("none" if drawn else options.baselines)
    sets = open_sets([name for name in options.set.split(",") if name], options.split, options.limit)
    common = _object("params", options.params)
    for name in ("method", "seed", "n"):
        if name in common:
            raise InvalidInput("params", name, "is not for --params; use --methods and --seeds")
    if labels:
        check_checkpoints(options.pair, options.checkpoints)
    torch.set_num_threads(1)  # the loop's own tensors are small; the cores belong to the engines
    quiet_transformers()
    defaults = DecodingParams.from_dict(dict(read_json(options.pair, "pair.json").get("defaults", {})))
    params = [_params(one, measured, defaults, common) for one in sets]
    meter = EnergyMeter()
    llm = _open(options, params, meter.available)
    tasks = [_task(one, llm, own) for one, own in zip(sets, params, strict=True)]
    for task in tasks if labels else ():
        check_baseline(_plain(task.prompts, common, llm))
    made, pair = machine(), _describe(options.pair)
    hashes = {name: pair[name]["checkpoint_hash"] for name in ("target", "auxiliary")}
    store = Store(options.answers, hashes) if options.answers else None
    found: dict[str, Any] = {
        "machine": made,
        "energy": meter.name,
        "pair": pair,
        "seeds": options.seeds,
        "batch": options.batch,
        "timed": options.timed,
        "errors": "delete-one jackknife over groups of prompts, all seeds together; comparisons are paired",
        "sets": {},
    }
    opened = open_baselines(labels, options.checkpoints, llm, options.threads or made["cores"])
    for task in tasks:
        own: list[Decoder] = [Ours(label, llm, params) for label, params in task.params.items()]
        own += [make(_plain(task.prompts, common, llm)) for make in opened]
        kept = store.of(task.prompts.name, [prompt.id for prompt in task.prompts.prompts]) if store else None
        seeds = range(options.seeds)
        answers = measure(task.ids, own, seeds, options.batch, meter, task.prompts.name, kept, options.timed)
        scored = score(task.prompts, answers)
        group = 1 if options.timed else options.batch  # what was timed together is one unit of the errors
        rows = summarise(scored, group, [k for k in ks if k <= options.seeds])
        found["sets"][task.prompts.name] = {
            "prompts": len(task.ids),
            "left_out": task.left_out,
            "scoring": task.prompts.how or "open-ended",
            "parameters": {decoder.label: decoder.describe() for decoder in own},
            "settings": rows,
        }
        _show(task, rows, meter.name)
        if options.gain:
            gained = gain.gains(scored, group, gain.known(task.params))
            found["sets"][task.prompts.name]["gain"] = gained
            print(f"\n{report.gain_table(gained)}")
    if drawn:
        rows_of = {name: one["settings"] for name, one in found["sets"].items()}
        found["curves"] = [curves.points(c, chosen, name, rows) for name, rows in rows_of.items() for c in drawn]
    plain: dict[str, Any] = report.plain(found)
    return plain


def _show(task: Task, rows: Mapping[str, Any], energy: str) -> None:
    name, left = task.prompts.name, f", {len(task.left_out)} left out: too long" if task.left_out else ""
    print(f"\n{name}: {len(task.ids)} prompts{left}; {task.prompts.how or 'open-ended'}; energy: {energy}")
    print(f"± is one standard error over prompts; tokens/s is decoding alone\n\n{report.table(rows, energy)}")
    for base in REFERENCES:
        if base in rows and len(rows) > 1:
            print(f"\n{report.comparison(rows, base)}")


def _write(found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    drawn = "curves" in found
    name = options.name or ("curves" if drawn else "evaluation")
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    picture = options.results / f"{name}.png"
    if drawn:
        report.plot_curves(found["curves"], picture)
    elif options.gain:
        report.plot_gain(found["sets"], picture)
    else:
        report.plot_settings(found["sets"], picture)
    print(f"\nwritten to {options.results / name}.json and .png")
    return found


def _params(
    task: PromptSet, asked: Sequence[Asked], defaults: DecodingParams, common: Mapping[str, Any]
) -> dict[str, DecodingParams]:
    """Parameters by label for one set."""
    return {one.label: resolve(one, defaults, _common(task, common)) for one in asked}


def _common(task: PromptSet, common: Mapping[str, Any]) -> dict[str, Any]:
    return {"max_tokens": task.max_tokens, "stop": task.stop, **common}


def _plain(task: PromptSet, common: Mapping[str, Any], llm: LLM) -> DecodingParams:
    """What any decoder is given on a set."""
    return DecodingParams.from_dict(_common(task, common), undrafted(llm.pair.defaults))


def _describe(pair: Path) -> dict[str, Any]:
    values = read_json(pair, "pair.json")
    specs = {name: asdict(read_spec(pair / name)) for name in ("target", "auxiliary")}
    for spec in specs.values():
        del spec["source"]  # a folder of this machine; the checkpoint's hash says which it is
    return {"defaults": values["defaults"], "tuned": "tuning" in values, **specs}


def _open(options: argparse.Namespace, chosen: Sequence[Mapping[str, DecodingParams]], metered: bool) -> LLM:
    every = [params for own in chosen for params in own.values()]
    config = placed_config(
        options,
        rows=options.batch,  # on a GPU, blocks are captured for every number of rows
        max_draft_len=max(8, *(params.draft_len for params in every)),
        max_beam_width=max(8, *(params.beam_width for params in every)),
        # joules are those of the prompt too: no setting profits there from what the one before it has stored
        prefix_tokens=0 if metered else None,
    )
    return LLM(options.pair, config)


def _task(task: PromptSet, llm: LLM, params: dict[str, DecodingParams]) -> Task:
    """Prompts that fit every setting."""
    kept, left_out = [], []
    ids: list[Ids] = []
    for at, prompt in enumerate(task.prompts):
        try:
            requests = [llm.requests(prompt.text, own)[0] for own in params.values()]
        except CapacityExceeded:
            left_out.append(prompt.id)
            continue
        kept.append(at)
        ids.append(requests[0].prompt)
    if not kept:
        raise InvalidInput("set", task.name, "no prompt fits the pair's capacity; export it with a larger one")
    return Task(task if not left_out else Part(task, kept), ids, params, left_out)


class Part(PromptSet):
    """Some prompts of a set, numbered anew."""

    def __init__(self, whole: PromptSet, numbers: Sequence[int]) -> None:
        self._whole, self._numbers = whole, numbers
        self.name, self.stop, self.max_tokens = whole.name, whole.stop, whole.max_tokens
        self.scored, self.how, self.workers = whole.scored, whole.how, whole.workers
        self.prompts = [whole.prompts[at] for at in numbers]

    def right(self, number: int, text: str) -> bool | None:
        return self._whole.right(self._numbers[number], text)


def _integers(field: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise InvalidInput(field, text, "give integers of at least 1, separated by commas")
    return found


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidInput(field, text, 'give a JSON object such as {"temperature": 0.8}')
    return value
