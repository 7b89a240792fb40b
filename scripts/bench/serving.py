"""Throughput and latency under load, against outside baselines, in one interleaved run.

    python -m scripts.bench serving                      all of it, a quarter of an hour
    python -m scripts.bench serving --quick              a minute, to see that it works
    python -m scripts.bench serving --baselines none     this package alone

For 1 to 16 requests in flight, SQL and code prompts apart, each method runs in its own loop, beside Hugging Face
`generate` (plain, assisted) and onnxruntime-genai on the same checkpoints, all in float32 with the same sampling. They
take turns in slices of a second or so, in an order that rotates, so that whatever else the machine does falls on all of
them alike; see scripts/systems/ for how each serves. Prompts are not kept for reuse.

* Throughput: useful tokens a second, up to the end of each text, prompts included in the time; median, lowest and
  highest slice. Ratios are taken round by round, then their median.
* Latency of the requests that ended: time to first token, time per output token after it, end to end.
* The same 8 prompts at once and one after another.
* A check that the comparison is fair: every system answers the same prompts; accuracy (SQL) and the perplexity of the
  texts under the target must agree with `sample`'s for all that preserve the target's distribution.

Prints tables and, as its last line, one JSON object; writes serving.json and serving.png.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from engines.quiet import quiet_transformers
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.commands.entry import placed_config
from runtime.llm import LLM
from scripts.bench.gate import compare_adaptive, gate_table
from scripts.bench.methods import BASE, KINDS, methods
from scripts.bench.serving_tables import LATENCIES, align, check_table, latency_table, plot, throughput_table
from scripts.demo import dataset
from scripts.demo.dataset import Example, matches
from scripts.evaluation.decoders import mean_nll
from scripts.machine import machine
from scripts.paths import DEMO, ROOT
from scripts.systems import GENAI, GenAI, HuggingFace, InFlight, Prompt, Slice, System, load_checkpoint

CHECKPOINTS = DEMO / "pair"
LOADS = (1, 2, 4, 8, 16)
OURS = ("sample", "speculative", "mtad", "mmtad", "speculative adaptive", "mtad adaptive")
Cells = dict[int, dict[str, list[Slice]]]
"""Slices by requests in flight and system; the n-th slices of all systems are of one round."""


def our_params(kind: str, max_tokens: int) -> dict[str, DecodingParams]:
    """Parameters of each method of ours for a kind of prompt: gamma 4, B 4, tuned thresholds."""
    fixed = {name: replace(p, speculation="fixed") for name, p in methods(kind).items() if name in OURS}
    adaptive = {f"{name} adaptive": replace(fixed[name], speculation="adaptive") for name in ("speculative", "mtad")}
    return {name: replace(p, max_tokens=max_tokens) for name, p in (fixed | adaptive).items()}


def measure(
    systems: Sequence[System],
    params: Mapping[str, DecodingParams],
    prompts: Sequence[Prompt],
    loads: Sequence[int],
    rounds: int,
    seconds: float,
    label: str = "",
) -> Cells:
    """Slices of all systems, by load.

    Args:
        systems: what to compare.
        params: of each system, by name.
        prompts: every system gets them in the same order, again and again.
        loads: requests in flight.
        rounds: slices of each system at each load.
        seconds: length of a slice.
        label: shown at the progress bar.
    """
    cells: Cells = {}
    with tqdm(total=len(loads) * rounds * len(systems), desc=label, unit="slice", file=sys.stderr) as bar:
        for load in loads:
            cells[load] = {system.name: [] for system in systems}
            order = list(prompts)
            random.Random(load).shuffle(order)
            for system in systems:
                system.begin(cycle(order), load, params[system.name])
            for number in range(rounds):
                turn = number % len(systems)
                for system in (*systems[turn:], *systems[:turn]):
                    cells[load][system.name].append(system.slice(seconds))
                    bar.update()
            for system in systems:
                system.end()
    return cells


def summarise(slices: Mapping[str, Sequence[Slice]], references: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Figures of each system at one load.

    Args:
        slices: by system, the n-th ones of one round.
        references: systems the others are compared with, as far as they are there.
    """
    rates = {name: [one.tokens / one.seconds for one in taken] for name, taken in slices.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, taken in slices.items():
        finished = [one for part in taken for one in part.finished]
        firsts, wholes = [one.first * 1e3 for one in finished], [one.whole * 1e3 for one in finished]
        paces = [one.per_token * 1e3 for one in finished if one.per_token is not None]
        against = {
            base: [a / b for a, b in zip(rates[name], rates[base], strict=True)] for base in references if base in rates
        }
        rows[name] = {
            "tokens_per_second": _spread(rates[name]),
            "vs": {base: _spread(ratios) for base, ratios in against.items()},
            "requests": len(finished),
            "tokens_per_request": sum(len(one.tokens) for one in finished) / len(finished) if finished else None,
        } | {
            key: {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)} if values else None
            for key, values in zip(LATENCIES, (firsts, paces, wholes), strict=True)
        }
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def measure_eight(
    systems: Sequence[System],
    params: Mapping[str, DecodingParams],
    prompts: Sequence[Prompt],
    groups: int,
    label: str = "",
) -> dict[str, dict[str, Any]]:
    """The same 8 prompts at once and one after another, with the same seeds: ratio of useful tokens a second."""
    ratios: dict[str, list[float]] = {system.name: [] for system in systems}
    equal = dict.fromkeys(ratios, True)
    for number in tqdm(range(groups), desc=label, unit="group", file=sys.stderr):
        batch = prompts[number * 8 : number * 8 + 8]
        for system in systems:
            found: dict[int, tuple[float, list[list[int]]]] = {}
            for load in (8, 1) if number % 2 else (1, 8):
                part = system.run(batch, load, params[system.name])
                found[load] = part.tokens / part.seconds, [one.tokens for one in part.finished]
            ratios[system.name].append(found[8][0] / found[1][0])
            equal[system.name] &= found[8][1] == found[1][1]
    return {name: {"speedup": _spread(taken), "same_tokens": equal[name]} for name, taken in ratios.items()}


def check(
    systems: Sequence[System],
    params: Mapping[str, DecodingParams],
    prompts: Sequence[Prompt],
    examples: Sequence[Example],
    judge: PreTrainedModel,
    decode: Any,
    label: str = "",
) -> dict[str, dict[str, Any]]:
    """Every system's answers to the same prompts, 8 at a time: accuracy, perplexity under `judge`, length.

    Perplexity is exp of the mean over texts of their mean negative log-likelihood a token, at temperature 1 without
    filters; errors are standard errors over prompts.
    """
    rows: dict[str, dict[str, Any]] = {}
    for system in tqdm(systems, desc=label, unit="system", file=sys.stderr):
        answers = system.run(prompts, 8, params[system.name]).finished
        nll = [mean_nll(judge, prompt.ids, one.tokens) for prompt, one in zip(prompts, answers, strict=True)]
        right = [
            matches(examples[one.prompt], decode(one.tokens, skip_special_tokens=True))
            for one in answers
            if examples[one.prompt].kind == "sql"
        ]
        rows[system.name] = {
            "prompts": len(prompts),
            "tokens": statistics.mean(len(one.tokens) for one in answers),
            "perplexity": math.exp(statistics.mean(nll)),
            "perplexity_error": math.exp(statistics.mean(nll)) * _error(nll),
            "accuracy": statistics.mean(right) if right else None,
            "accuracy_error": _error([float(one) for one in right]) if right else None,
        }
    return rows


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else float("nan")


def open_systems(options: argparse.Namespace, loads: Sequence[int], threads: int) -> list[System]:
    """Our methods, each in a loop of its own without kept prompts, and the baselines asked for."""
    systems: list[System] = []
    if options.baselines == "all":
        systems.append(GenAI(GENAI, threads))  # first: it may be missing
    if options.baselines != "none":
        systems.append(HuggingFace(CHECKPOINTS / "target", threads=threads))
        systems.append(HuggingFace(CHECKPOINTS / "target", CHECKPOINTS / "auxiliary", threads))
    rows = max(8, *loads)
    ours = [
        InFlight(
            name,
            LLM(
                options.pair,
                placed_config(options, rows=rows, prefix_tokens=0),
            ),
        )
        for name in OURS
    ]
    return [*ours, *systems]


def run(options: argparse.Namespace) -> None:
    """The command; see the module's description."""
    quick = options.quick
    loads = tuple(options.loads or ((1, 4) if quick else LOADS))
    if min(loads) < 1:
        raise InvalidInput("loads", loads, "give numbers of at least 1")
    rounds, seconds = options.rounds or (2 if quick else 4), options.seconds or (0.3 if quick else 1.0)
    if rounds < 1 or seconds <= 0:
        raise InvalidInput("rounds", rounds, "give at least 1, and seconds above 0")
    max_tokens = 32 if quick else BASE.max_tokens
    folder = options.results or ROOT / ("build/results" if quick else "docs/results")
    torch.set_num_threads(1)
    quiet_transformers()
    report: dict[str, Any] = {"command": "python -m scripts.bench " + " ".join(sys.argv[1:]), "machine": machine()}
    threads = options.threads or report["machine"]["cores"]
    systems = open_systems(options, loads, threads)
    judge, references = (
        load_checkpoint(CHECKPOINTS / "target"),
        ["sample", *(s.name for s in systems if s.name not in OURS)],
    )
    for system in systems:
        if isinstance(system, GenAI):
            report["machine"]["versions"]["onnxruntime-genai"] = system.version
    report["settings"] = {
        "threads": threads,
        "loads": loads,
        "rounds": rounds,
        "seconds": seconds,
        "max_tokens": max_tokens,
    }
    fixed = [system for system in systems if system.name in ("sample", "speculative", "mtad", "mmtad")]
    tokenizer = next(system for system in systems if isinstance(system, InFlight)).tokenizer
    for kind, name in ((kind, KINDS[kind]) for kind in options.kinds):
        examples = dataset.load("test", kind)
        prompts = [Prompt(number, tuple(tokenizer(e.prompt).input_ids)) for number, e in enumerate(examples)]
        params = our_params(kind, max_tokens)
        used = {system.name: params.get(system.name, replace(BASE, max_tokens=max_tokens)) for system in systems}
        cells = measure(systems, used, prompts, loads, rounds, seconds, name)
        load = {count: summarise(slices, references) for count, slices in cells.items()}
        gate = {
            count: compare_adaptive({n: [one.tokens / one.seconds for one in taken] for n, taken in slices.items()})
            for count, slices in cells.items()
        }
        eight = measure_eight(fixed, used, prompts, 1 if quick else 3, f"{name}, the same 8")
        checked = prompts[: 8 if quick else 64 if kind == "sql" else 16]
        answers = check(systems, used, checked, examples, judge, tokenizer.decode, f"{name}, answers")
        print(f"\n{name}\n\n{throughput_table(load)}\n\n{latency_table(load)}\n\n{align(gate_table(gate))}\n")
        print("the same 8 prompts at once against one after another:")
        for system_name, row in eight.items():
            s, same = row["speedup"], "the same tokens" if row["same_tokens"] else "DIFFERENT TOKENS"
            print(f"  {system_name:<12} {s['median']:.2f} ({s['low']:.2f} .. {s['high']:.2f}), {same}")
        print(f"\nanswers to the same {len(checked)} prompts (+- is one standard error):\n{check_table(answers)}")
        report[kind] = {
            "params": {n: {"method": p.method, "accept_threshold": p.accept_threshold} for n, p in params.items()},
            "load": {str(count): rows for count, rows in load.items()},
            "adaptive": {str(count): rows for count, rows in gate.items()},
            "same_eight": eight,
            "check": answers,
        }
    report["settings"]["huggingface_threads"] = {s.name: s.threads for s in systems if isinstance(s, HuggingFace)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serving.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(report, folder / "serving.png", OURS)
    print(f"\nwritten to {folder}")
    print(json.dumps(report))
