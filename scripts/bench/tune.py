"""Choosing `accept_threshold` for each kind of text, on the development split."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from runtime import LLM
from runtime.commands.tune import curve
from runtime.tuning.search import Objective, describe
from runtime.tuning.search import tune as search
from scripts.bench.methods import BASE, KINDS, TUNED
from scripts.evaluation.prompts import Demo

THRESHOLDS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


PERPLEXITY_MARGIN = 0.75
"""`tune` asks on open-ended text for at most this share of `sample`'s perplexity (the paper's claim is 0.788)."""


def tune(llm: LLM, count: dict[str, int]) -> dict[str, Any]:
    """Choose thresholds of `mtad` and `mmtad` for each kind of text on the development split, as `mtad tune` does.

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
