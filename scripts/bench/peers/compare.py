"""This toolkit against other libraries on the same checkpoints, and its own methods and drafts against each other.

Each library runs in a process and an environment of its own (scripts/baselines.sh installs them), reads token ids and
returns token ids, which are counted here. Every text has the same length, whatever token would end it. At the start,
each system's greedy texts are compared with the checkpoint, and its sampled texts are scored by it: one whose texts are
less likely than those of plain sampling does not decode what it was asked to. A slice is one job: twice as many prompts
as are in flight, prompts included in the time; a system that decodes one text at a time gets the first two of them. In
each round all systems answer the same prompts, one system after another, in an order that rotates. Ratios are taken
round by round. An interrupted run goes on where it ended.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines.kinds import QUANTIZED
from engines.placement import cores
from mtad.errors import Failed, InvalidInput
from runtime.config import use_torch
from runtime.pair import open_tokenizer
from scripts.bench import pairs
from scripts.bench.drafts import prompts_of
from scripts.bench.peers.catalog import System, catalog
from scripts.bench.peers.report import plot, tables
from scripts.bench.peers.worker import Worker
from scripts.demo import dataset
from scripts.paths import DEMO

__all__ = ["plot", "run", "tables"]

SAMPLING = {"temperature": 1.0, "top_k": 10, "top_p": 0.9}
TOLERANCE = {"float32": 1e-3, "fastest": 0.5, "int8": 0.5, "int4": 3.0}
"""By how much the logit of a greedy token may lie below the largest, under the checkpoint in float32: rounding, and
what quantized weights cost."""
CHECKED, CHECK_TOKENS, WARM_TOKENS = 4, 32, 12
JUDGED = 32  # sampled texts of each system, whose likelihood says what its sampling is worth
LEARNING = 3  # slices before a load's first one, in which automatic drafts learn what pays


@torch.no_grad()
def scores(model: PreTrainedModel, prompt: Sequence[int], text: Sequence[int], eos: int) -> tuple[float, float]:
    """How far a text's logits lie below the largest ones at most; its tokens' mean negative log-likelihood, in nats.

    The first is 0 for a greedy text. Where `eos` would end it, the next likeliest may stand: some libraries leave that
    token out. The second is unfiltered and at temperature 1.
    """
    logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1].float()
    tokens = torch.tensor(text)[:, None]
    surprise = -float(logits.log_softmax(-1).gather(1, tokens).mean())
    own = logits.gather(1, tokens)[:, 0]
    logits[:, eos] = -torch.inf
    return max(0.0, float((logits.max(1).values - own).max())), surprise


def perplexity(surprises: Sequence[float], plain: Sequence[float]) -> dict[str, float]:
    """Of texts, from the `scores` of each, and relative to that of `plain` sampling's of the same prompts."""
    apart = [a - b for a, b in zip(surprises, plain, strict=True)]
    ratio = math.exp(statistics.fmean(apart))
    error = ratio * statistics.stdev(apart) / len(apart) ** 0.5
    return {"value": math.exp(statistics.fmean(surprises)), "ratio": ratio, "error": error}


class Comparison:
    """The systems of one size and precision, whose jobs all say what `base` says."""

    def __init__(
        self, size: str, precision: str, systems: Sequence[System], base: Mapping[str, Any], kind: str = "code"
    ) -> None:
        self._systems, self._base, self._tolerance = systems, base, TOLERANCE[precision]
        self._label, self._folder = f"{size}, {precision}", pairs.folder_of(size)
        tokenizer = open_tokenizer(pairs.checkpoints(size) / "target")
        self._prompts = prompts_of(lambda text: list(tokenizer(text).input_ids), kind)
        # copies of the demo pair compute what it does, and it takes the least time
        self._model = AutoModelForCausalLM.from_pretrained(DEMO / "pair" / "target", dtype=torch.float32).eval()
        self._workers, self._warm = dict[tuple[str, ...], Worker](), set[tuple[str, int]]()
        described = json.dumps([dict(base), [[*one.command, dict(one.job)] for one in systems]])
        self.journal = self._folder / f"{precision}-{hashlib.sha256(described.encode()).hexdigest()[:8]}.jsonl"
        self.journal.touch()
        self._done: dict[str, Any] = dict(map(json.loads, self.journal.read_text(encoding="utf-8").splitlines()))

    def measure(self, loads: Sequence[int], rounds: int, judged: int) -> dict[str, dict[str, Any]]:
        """Of each system: its library, method and versions, whether it batches, rates by load, and perplexity.

        Raises:
            Failed: a worker failed, or its greedy texts are not the checkpoint's; it is named.
        """
        systems, found = self._systems, dict[str, dict[str, Any]]()
        for one in tqdm(systems, desc=f"{self._label}, checks", unit="system"):
            about = {"library": one.library, "method": one.method, "batches": one.batches}
            checked = self._once(f"{one.name}, check", self._check, one, judged)
            found[one.name] = {**about, **checked, "rates": {str(load): [] for load in loads}}
        for number, load in tqdm(list(itertools.product(range(rounds), loads)), desc=self._label, unit="turn"):
            turn = number * len(systems) // rounds  # so that each is early in some round, and late in another
            for one in (*systems[turn:], *systems[:turn]):
                rate = self._once(f"{one.name}, {load}, {number}", self._slice, one, load, number)
                found[one.name]["rates"][str(load)].append(rate)
        plain = next(row["surprises"] for row in found.values() if row["method"] == "sample")
        for row in found.values():
            row["perplexity"] = perplexity(row.pop("surprises"), plain)
        return found

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()

    def _once(self, name: str, measure: Callable[..., Any], *given: Any) -> Any:
        """What was measured under this name, now or in an interrupted run."""
        if name not in self._done:
            self._done[name] = measure(*given)
            with self.journal.open("a", encoding="utf-8") as file:
                print(json.dumps([name, self._done[name]]), file=file)
        return self._done[name]

    def _ask(self, one: System, prompts: Sequence[Any], load: int, seed: int, **changes: int) -> tuple[Any, float]:
        if one.command not in self._workers:
            log = self._folder / f"worker-{len(self._workers)}.log"
            self._workers[one.command] = Worker(one.name, one.command, log)
        job = {**self._base, "prompts": prompts, "in_flight": load if one.batches else 1, "seed": seed}
        return self._workers[one.command].ask({**job, **one.job, **changes})

    def _scores(self, one: System, count: int, **changes: int) -> list[tuple[float, float]]:
        prompts, eos = self._prompts[:count], self._model.generation_config.eos_token_id
        texts, _ = self._ask(one, prompts, 8, 0, **changes)
        return [scores(self._model, prompt, text, eos) for prompt, text in zip(prompts, texts, strict=True)]

    def _check(self, one: System, judged: int) -> dict[str, Any]:
        """Its greedy texts, which must be the checkpoint's up to rounding, and the likelihood of its sampled ones."""
        gap = max(gap for gap, _ in self._scores(one, CHECKED, tokens=CHECK_TOKENS, top_k=1))
        if gap > self._tolerance:
            problem = f"a token's logit lies {gap:.3g} below the largest, more than {self._tolerance}"
            raise Failed(f"{one.name}: its greedy texts are not the checkpoint's: {problem}")
        surprises = [surprise for _, surprise in self._scores(one, judged)]
        return {"versions": self._workers[one.command].versions, "greedy_gap": gap, "surprises": surprises}

    def _slice(self, one: System, load: int, number: int) -> float:
        """Tokens per second."""
        chosen = random.Random(f"{load} {number}").sample(self._prompts, 2 * load)[: None if one.batches else 2]
        if (one.name, load) not in self._warm:
            automatic = one.method.endswith(" auto") or "lookup" in one.method
            for _ in range(LEARNING if automatic else 1):
                self._ask(one, chosen, load, number, **({} if automatic else {"tokens": WARM_TOKENS}))
            self._warm.add((one.name, load))
        texts, seconds = self._ask(one, chosen, load, number)
        return sum(map(len, texts)) / seconds


def run(options: Namespace) -> dict[str, Any]:
    """Compare, by size and precision.

    Raises:
        InvalidInput: there are too few prompts for a load, or as `catalog`; nothing was made.
        Failed: as `Comparison.measure`.
    """
    if options.quick:
        options.sizes, options.precisions, options.loads = ["demo"], ["float32"], [1, 2]
        options.rounds, options.tokens = 2, 8
    prompts, most = len(dataset.load("test", "code")), max(options.loads)
    if 2 * most > prompts:
        problem = f"give at most {prompts // 2}: a slice takes twice as many of the {prompts} prompts"
        raise InvalidInput("loads", most, problem)
    for precision in options.precisions:
        catalog(options, precision, {})  # which refuses what is unknown before anything is made
    use_torch()
    base, judged = {**SAMPLING, "tokens": options.tokens}, CHECKED if options.quick else JUDGED
    if options.edit:
        base["top_k"] = 1
    settings: dict[str, Any] = {"threads": cores(), "rows": max(8, *options.loads)}
    journals, sets = list[Path](), dict[str, dict[str, Any]]()
    for size, precision in itertools.product(options.sizes, options.precisions):
        weights = precision if precision in QUANTIZED else None
        settings |= {"checkpoints": str(pairs.checkpoints(size)), "pair": str(pairs.exported(size, precision=weights))}
        systems = catalog(options, precision, {**settings, "folder": str(pairs.folder_of(size))})
        kind = "edit" if options.edit else "code"
        with closing(Comparison(size, precision, systems, base, kind)) as comparison:
            sets.setdefault(size, {})[precision] = comparison.measure(options.loads, options.rounds, judged)
            journals.append(comparison.journal)
    for journal in journals:
        journal.unlink()
    return {"settings": {**base, "threads": cores(), "rounds": options.rounds}, "sets": sets}
