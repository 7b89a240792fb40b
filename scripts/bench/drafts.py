"""What drafts of the auxiliary, looked-up drafts and both give, by kind of text: tokens per pass and tokens per second.

Prompts are the demo's. `code` goes on with source code; in `edit`, the prompt is a file and the beginning of the same
file again, so that what follows is mostly a copy; `sql` answers questions, and `json` makes objects of sentences. Each
batch of prompts is decoded with every setting in turn, so figures are ratios to `sample` batch by batch. Where texts
are kept, each kind and temperature begins with none.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import InvalidInput
from runtime.tuning.measure import answer
from scripts.bench.intervals import paired_ratio, shown
from scripts.demo import dataset
from scripts.results import Rows

SETTINGS = {
    "sample": DecodingParams(method="sample"),
    "model": DecodingParams(draft="model"),
    "lookup": DecodingParams(draft="lookup"),
    "lookup+model": DecodingParams(draft="lookup+model"),
    "lookup, kept": DecodingParams(draft="lookup"),
    "lookup+model, kept": DecodingParams(draft="lookup+model"),
    "lookup of trees, kept": DecodingParams(method="traversal", draft="lookup"),
}
"""By what drafts; all but `sample` are automatic drafts, of `block` or for trees of `traversal`. With `kept`, they are
looked up in texts of ended requests as well."""
KINDS, TEMPERATURES, TOKENS, FILE, KEPT = ("code", "edit", "sql", "json"), (0.0, 1.0), 96, 240, 16_384
"""Kinds of text; tokens of an answer at most, of a file, and of kept texts."""


def prompts_of(tokenize: Callable[[str], list[int]], kind: str) -> list[list[int]]:
    """Token ids of all prompts of a kind."""
    prompts = [one.prompt for one in dataset.load("test", "code" if kind == "edit" else kind)]
    if kind != "edit":
        return list(map(tokenize, prompts))
    files = [tokenize(prompt)[:FILE] for prompt in prompts]
    return [[*file, *tokenize("\n\n"), *file[: max(24, len(file) // 3)]] for file in files]


def run(options: Namespace) -> dict[str, Any]:
    """Decode batches of each kind.

    Raises:
        InvalidInput: there are not two batches of each kind; nothing was decoded.
    """
    batches = 4 if options.quick else options.batches
    prompts_of_kind = min(len(dataset.load("test", kind)) for kind in KINDS if kind != "edit")
    if batches < 2:
        raise InvalidInput("batches", batches, "give at least 2: the first one is not counted")
    if prompts_of_kind < 2 * options.rows:
        problem = f"give at most {prompts_of_kind // 2}: two batches have to be made of {prompts_of_kind} prompts"
        raise InvalidInput("rows", options.rows, problem)
    llm = LLM(options.pair, RuntimeConfig(threads=options.threads))
    llms = {name: LLM(llm.pair, RuntimeConfig(lookup_tokens=KEPT if "kept" in name else 0)) for name in SETTINGS}
    found: dict[str, Any] = {}
    for kind, temperature in tqdm(list(itertools.product(KINDS, TEMPERATURES)), desc="drafts", unit="cell"):
        prompts, salt = prompts_of(llm.tokenize, kind), f"{kind} {temperature}"
        ignore_eos = kind in ("code", "edit")
        own: dict[str, Any] = {"temperature": temperature, "max_tokens": TOKENS, "ignore_eos": ignore_eos}
        counts = {name: {"tokens": 0, "passes": 0, "drafted": 0, "accepted": 0} for name in SETTINGS}
        rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for number in range(min(batches, len(prompts) // options.rows)):
            batch = prompts[number * options.rows : (number + 1) * options.rows]
            for name in sorted(SETTINGS, key=lambda one: (list(SETTINGS).index(one) + number) % len(SETTINGS)):
                params = replace(SETTINGS[name], **own)
                made = [one for prompt in batch for one in llms[name].requests(prompt, params, cache_salt=salt)]
                results, taken = answer(llms[name], made)
                tokens = sum(len(result.token_ids) for result in results)
                if number:  # the first batch finds out what blocks take
                    rates[name].append(tokens / taken)
                    counts[name]["tokens"] += tokens
                    for count, field in (("passes", "target_passes"), ("drafted", "drafted"), ("accepted", "accepted")):
                        counts[name][count] += sum(getattr(result.statistics, field) for result in results)
        found[f"{kind} {temperature:g}"] = {
            name: {**counts[name], "rates": rates[name], "ratio": paired_ratio(rates[name], rates["sample"])}
            for name in SETTINGS
        }
    return {"rows": options.rows, "threads": options.threads, "texts": found}


def tables(figures: Mapping[str, Any]) -> dict[str, Rows]:
    """Tokens per pass, and behind it tokens per second as a multiple of `sample`'s, by kind of text and what drafts."""
    names = [name for name in next(iter(figures["texts"].values())) if name != "sample"]
    lines = [["text", "temperature", *names]]
    for text, own in figures["texts"].items():
        passes = {name: f"{own[name]['tokens'] / own[name]['passes']:.2f}" for name in names}
        lines.append([*text.split(), *(f"{passes[name]}: {shown(own[name]['ratio'])}" for name in names)])
    return {"drafts": lines}
