"""What drafts of the auxiliary, looked-up drafts and both give, by kind of text: tokens per pass and tokens per second.

Prompts are the demo's. `code` goes on with source code; in `edit`, the prompt is a file and the beginning of the same
file again, so that what follows is mostly a copy; `sql` answers questions. Each batch of prompts is decoded with every
setting in turn, so figures are ratios to `sample` batch by batch.
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime import LLM, DecodingParams, RuntimeConfig
from runtime.tuning.measure import answer
from scripts.bench.intervals import paired_ratio, shown
from scripts.demo import dataset
from scripts.results import Rows

SETTINGS = {
    "sample": DecodingParams(method="sample"),
    "model": DecodingParams(draft="model"),
    "lookup": DecodingParams(draft="lookup"),
    "lookup+model": DecodingParams(draft="lookup+model"),
}
"""By what drafts; all but the first are `block` with automatic drafts."""
KINDS, TEMPERATURES, TOKENS, FILE = ("code", "edit", "sql"), (0.0, 1.0), 96, 240
"""Kinds of text; tokens of an answer at most, and of a file."""


def prompts_of(llm: LLM, kind: str) -> list[list[int]]:
    """Token ids of all prompts of a kind."""
    prompts = [llm.tokenize(one.prompt) for one in dataset.load("test", "sql" if kind == "sql" else "code")]
    if kind != "edit":
        return prompts
    between, files = llm.tokenize("\n\n", special_tokens=False), [prompt[:FILE] for prompt in prompts]
    return [[*file, *between, *file[: max(24, len(file) // 3)]] for file in files]


def run(options: Namespace) -> dict[str, Any]:
    """Decode batches of each kind for some seconds."""
    llm, seconds = LLM(options.pair, RuntimeConfig(threads=options.threads)), 1.0 if options.quick else options.seconds
    found: dict[str, Any] = {}
    for kind, temperature in itertools.product(KINDS, TEMPERATURES):
        prompts, end = prompts_of(llm, kind), time.perf_counter() + seconds
        own = {"temperature": temperature, "max_tokens": TOKENS, "ignore_eos": kind != "sql"}
        counts = {name: {"tokens": 0, "passes": 0, "drafted": 0, "accepted": 0} for name in SETTINGS}
        rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for number, turn in enumerate(itertools.cycle(range(len(prompts) // options.rows))):
            batch = prompts[turn * options.rows : (turn + 1) * options.rows]
            for name in sorted(SETTINGS, key=lambda one: (list(SETTINGS).index(one) + number) % len(SETTINGS)):
                results, taken = answer(llm, batch, [replace(SETTINGS[name], **own)] * len(batch))
                tokens = sum(len(result.token_ids) for result in results)
                if number:  # the first batch finds out what blocks take
                    rates[name].append(tokens / taken)
                    counts[name]["tokens"] += tokens
                    for count, field in (("passes", "target_passes"), ("drafted", "drafted"), ("accepted", "accepted")):
                        counts[name][count] += sum(getattr(result.statistics, field) for result in results)
            if number > 2 and time.perf_counter() > end:
                break
        found[f"{kind} {temperature:g}"] = {
            name: {**counts[name], "rates": rates[name], "ratio": paired_ratio(rates[name], rates["sample"])}
            for name in SETTINGS
        }
    return {"rows": options.rows, "threads": options.threads, "texts": found}


def tables(figures: Mapping[str, Any]) -> dict[str, Rows]:
    """Tokens per pass, and tokens per second as a multiple of `sample`'s, by kind of text and what drafts."""
    names = [name for name in SETTINGS if name != "sample"]
    header = [*(f"{name}: tokens per pass" for name in names), *(f"{name}: x sample" for name in names)]
    lines = [["text", "temperature", *header]]
    for text, own in figures["texts"].items():
        passes = [f"{own[name]['tokens'] / own[name]['passes']:.2f}" for name in names]
        lines.append([*text.split(), *passes, *(shown(own[name]["ratio"]) for name in names)])
    return {"drafts": lines}
