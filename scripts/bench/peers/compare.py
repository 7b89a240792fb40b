"""This package against other libraries on the same checkpoints, in interleaved slices.

    mtad bench peers                       all of it, hours; an interrupted run goes on where it ended
    mtad bench peers --quick               a proof that it works, into build/results
    mtad bench peers --sizes 78M --peers openvino-genai llama.cpp --peer-temperature 0.8

Each library runs in a process and an environment of its own (scripts/baselines.sh installs them), reads token ids and
returns token ids, which are counted here. Every text has the same length, whatever token would end it. At the start,
each system's greedy texts are compared with the checkpoint, and its sampled texts are scored by it: one whose texts are
less likely than those of plain sampling does not decode what it was asked to. A slice is one job: twice as many prompts
as are in flight, prompts included in the time; a system that decodes one text at a time gets the first two of them. In
each round all systems answer the same prompts, one system after another, in an order that rotates. Ratios are taken
round by round.
"""

from __future__ import annotations

import hashlib
import json
import random
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from engines.placement import cores
from mtad.errors import Failed, InvalidInput
from runtime.commands.entry import Parser
from runtime.config import use_torch
from runtime.pair import open_tokenizer
from scripts.bench.peers.catalog import OURS, PEERS, PRECISIONS, System, at_temperature, catalog
from scripts.bench.peers.models import SIZES, Models
from scripts.bench.peers.report import plot, summarise, table
from scripts.bench.peers.store import Store
from scripts.bench.peers.worker import Worker
from scripts.demo import dataset
from scripts.machine import machine
from scripts.paths import DEMO, RESULTS, ROOT
from scripts.systems import load_checkpoint

TOLERANCE = {"float32": 1e-3, "fastest": 0.5}
"""By how much the logit of a greedy token may lie below the largest, under the checkpoint in float32: rounding."""
CHECKED, CHECK_TOKENS, WARM_TOKENS = 4, 32, 12
JUDGED = 32
"""Sampled texts of each system whose likelihood says what its sampling is worth."""
LEARNING = 3
"""Slices before a load's first one in which adaptive drafts learn what pays; a server has learnt it in a minute."""


@contextmanager
def opened(systems: Sequence[System], folder: Path) -> Iterator[tuple[dict[str, Worker], dict[str, str]]]:
    """Workers by system, all of them ready, and the versions of their packages."""
    workers: dict[tuple[str, ...], Worker] = {}
    try:
        for number, one in enumerate(systems):
            if one.command not in workers:
                workers[one.command] = Worker(one.name, one.command, folder / f"worker-{number}.log")
        found = {name: version for worker in workers.values() for name, version in worker.ready().items()}
        yield {one.name: workers[one.command] for one in systems}, found
    finally:
        for worker in workers.values():
            worker.close()


@torch.inference_mode()
def greedy_gap(model: PreTrainedModel, prompt: Sequence[int], text: Sequence[int], eos: Sequence[int]) -> float:
    """How far the logits of a text's tokens lie below the largest ones, at most; 0 if all are the largest.

    Where a token would end the text, the next likeliest may stand: some libraries leave such tokens out.
    """
    logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1].float()
    own = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    logits[:, list(eos)] = -torch.inf
    return max(0.0, float((logits.max(1).values - own).max()))


@torch.inference_mode()
def surprise(model: PreTrainedModel, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Mean negative log-likelihood of a text's tokens, unfiltered and at temperature 1, in nats."""
    log_p = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return -float(log_p.gather(1, torch.tensor(text)[:, None]).mean())


class Comparison:
    """The systems of one size and precision, measured.

    Args:
        models: the pair.
        precision: of `PRECISIONS`.
        systems: see `catalog`.
        prompts: token ids.
        base: what all jobs say: tokens, temperature, top_k, top_p.
        store: what was measured so far.
    """

    def __init__(
        self,
        models: Models,
        precision: str,
        systems: Sequence[System],
        prompts: Sequence[Sequence[int]],
        base: Mapping[str, Any],
        store: Store,
    ) -> None:
        self.models, self.precision, self.systems, self.store = models, precision, systems, store
        self._prompts, self._base = prompts, base
        self._warm: set[tuple[str, int]] = set()

    def measure(self, loads: Sequence[int], rounds: int) -> None:
        """Measure what is missing.

        Raises:
            Failed: a worker failed, or its greedy texts are not the checkpoint's; it is named.
        """
        turns = [
            (number, load, one)
            for number in range(rounds)
            for load in loads
            for one in (*self.systems[number % len(self.systems) :], *self.systems[: number % len(self.systems)])
        ]
        left = [turn for turn in turns if not self.store.has(round=turn[0], load=turn[1], system=turn[2].name)]
        if not left and not self._unjudged():
            return
        label = f"{self.models.size}, {self.precision}"
        with opened(self.systems, self.models.folder) as (workers, versions):
            self.store.add(versions=versions)
            self.check_greedy(workers)
            self.judge(workers)
            with tqdm(total=len(turns), initial=len(turns) - len(left), desc=label, unit="slice") as bar:
                for number, load, one in left:
                    bar.set_postfix_str(f"{one.name}, {load} in flight")
                    self._slice(workers[one.name], one, load, number)
                    bar.update()

    def _slice(self, worker: Worker, one: System, load: int, number: int) -> None:
        chosen = random.Random(f"{load} {number}").sample(self._prompts, 2 * load)[: None if one.batches else 2]
        job = self._job(one, chosen, load if one.batches else 1, number)
        if (one.name, load) not in self._warm:
            adaptive = one.method.endswith(" adaptive")
            for _ in range(LEARNING if adaptive else 1):
                worker.ask(job if adaptive else job | {"tokens": WARM_TOKENS})
            self._warm.add((one.name, load))
        texts, seconds = worker.ask(job)
        self.store.add(system=one.name, load=load, round=number, tokens=sum(map(len, texts)), seconds=round(seconds, 5))

    def _job(self, one: System, prompts: Sequence[Sequence[int]], load: int, seed: int) -> dict[str, Any]:
        return {**self._base, "prompts": list(prompts), "in_flight": load, "seed": seed, **one.job}

    def check_greedy(self, workers: Mapping[str, Worker]) -> None:
        """Refuse a system whose greedy texts are not the checkpoint's, up to rounding."""
        checked = {row["system"] for row in self.store.rows if "gap" in row}
        waiting = [one for one in self.systems if one.name not in checked]
        if not waiting:
            return
        model, prompts = load_checkpoint(self.models.checkpoints / "target"), self._prompts[:CHECKED]
        eos = model.generation_config.eos_token_id
        for one in tqdm(waiting, desc=f"{self.models.size}, {self.precision}, greedy texts", unit="system"):
            job = self._job(one, prompts, CHECKED if one.batches else 1, 0) | {"tokens": CHECK_TOKENS, "top_k": 1}
            texts, _ = workers[one.name].ask(job)
            ends = eos if isinstance(eos, list) else [eos]
            gap = max(greedy_gap(model, prompt, text, ends) for prompt, text in zip(prompts, texts, strict=True))
            if gap > TOLERANCE[self.precision]:
                problem = f"a token's logit lies {gap:.3g} below the largest, more than {TOLERANCE[self.precision]}"
                raise Failed(f"{one.name}: its greedy texts are not the checkpoint's: {problem}")
            self.store.add(system=one.name, gap=gap)

    def judge(self, workers: Mapping[str, Worker]) -> None:
        """Have each system sample texts of the same prompts, and note how likely they are under the checkpoint.

        Every size of the pair computes what the demo pair does, which takes the least time.
        """
        if not (waiting := self._unjudged()):
            return
        model, prompts = load_checkpoint(DEMO / "pair" / "target"), self._prompts[:JUDGED]
        for one in tqdm(waiting, desc=f"{self.models.size}, {self.precision}, sampled texts", unit="system"):
            texts, _ = workers[one.name].ask(self._job(one, prompts, 8 if one.batches else 1, 0))
            found = [surprise(model, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
            self.store.add(system=one.name, surprise=found)

    def _unjudged(self) -> list[System]:
        judged = {row["system"] for row in self.store.rows if "surprise" in row}
        return [one for one in self.systems if one.name not in judged]


def run(arguments: Sequence[str]) -> None:
    """The command; see the module's description."""
    own = Parser(prog="mtad bench peers", description=(__doc__ or "").splitlines()[0])
    own.add_argument("--sizes", nargs="+", choices=SIZES, default=["demo", "78M", "310M"], help="(default %(default)s)")
    own.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="(default both)")
    own.add_argument("--methods", nargs="+", default=list(OURS), help="ours (default %(default)s)")
    own.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="(default all)")
    own.add_argument("--peer-temperature", type=float, help="peers with draft models also run at this one")
    own.add_argument(
        "--loads", nargs="+", type=int, default=[1, 4, 8, 16], help="requests in flight (default 1 4 8 16)"
    )
    own.add_argument("--rounds", type=int, default=8, help="slices of each system at each load (default %(default)s)")
    own.add_argument("--tokens", type=int, default=100, help="of each text (default %(default)s)")
    own.add_argument("--temperature", type=float, default=1.0, help="(default %(default)s)")
    own.add_argument("--top-k", type=int, default=10, help="(default %(default)s)")
    own.add_argument("--top-p", type=float, default=0.9, help="(default %(default)s)")
    own.add_argument("--threads", type=int, default=cores(), help="of each system (default: all cores)")
    own.add_argument("--fresh", action="store_true", help="forget the slices of an interrupted run")
    own.add_argument("--quick", action="store_true", help="two rounds of short texts of the demo pair")
    own.add_argument("--results", type=Path, help="folder to write to (default docs/results)")
    options = own.parse_args(arguments)
    if options.quick:
        options.sizes, options.loads, options.rounds, options.tokens = ["demo"], [1, 4], 2, 24
    for name in ("loads", "rounds", "tokens", "threads"):
        if min([getattr(options, name)] if name != "loads" else options.loads) < 1:
            raise InvalidInput(name, getattr(options, name), "give at least 1")
    use_torch()
    base = {name: getattr(options, name) for name in ("tokens", "temperature", "top_k", "top_p")}
    report: dict[str, Any] = {
        "command": f"mtad bench {shlex.join(sys.argv[1:])}",
        "machine": machine(),
        "settings": {**base, "threads": options.threads, "rounds": options.rounds},
        "sets": {},
    }
    for size in options.sizes:
        models, found = Models(size, ROOT / "build" / "peers"), {}
        tokenizer = open_tokenizer(models.checkpoints / "target")
        prompts = [list(tokenizer(example.prompt).input_ids) for example in dataset.load("test", "code")]
        for precision in options.precisions:
            rows = max(options.loads)
            systems = catalog(models, precision, options.methods, options.peers, options.threads, rows)
            if options.peer_temperature is not None:
                systems += at_temperature(systems, options.peer_temperature)
            described = [base, options.threads, rows, *([one.name, dict(one.job)] for one in systems)]
            key = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:8]
            path = models.folder / f"{precision}-{key}.jsonl"
            if options.fresh:
                path.unlink(missing_ok=True)
            store = Store(path)
            Comparison(models, precision, systems, prompts, base, store).measure(options.loads, options.rounds)
            found[precision] = summarise(systems, store.rows, options.loads, options.rounds)
        report["sets"][size] = found
        print(f"\n{size}\n\n{table(found)}", flush=True)
    folder = options.results or (ROOT / "build" / "results" if options.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(report["sets"], folder / "peers.png")
    print(f"\nwritten to {folder}")
