"""Every setting on every prompt, in turns, with the draft that suits it best.

Settings take turns, in an order that rotates, so that whatever else the machine does falls on all of them alike. The
first answer to each of the first prompts is decoded alone, and timed. All other answers to `CHUNK` prompts are decoded
at once, in as many rows as the pair has, which gives the same law (and on ONNX Runtime's CPU provider the same tokens).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from engines.folder import read_spec
from mtad import LLM, RuntimeConfig
from mtad.errors import CapacityExceeded, InvalidInput
from mtad.params import DecodingParams
from runtime.pair import ROLES
from runtime.scheduler.request import TokenScore
from runtime.tuning.measure import answer
from scripts.energy import EnergyMeter
from scripts.evaluation.answers import Answer, Store
from scripts.evaluation.prompts import PromptSet
from scripts.evaluation.settings import Setting

Ids = Sequence[int]
SHOWN = {"file": sys.stderr, "unit": "setting", "mininterval": 0.5 if sys.stderr.isatty() else 30.0}
CHUNK = 16
"""Prompts whose answers are decoded at once, and kept together."""


class Writers:
    """The pair, and its auxiliary opened as a pair of which it is the target.

    Args:
        pair: folder.
        config: how both run.
        scored: the target looks at what the auxiliary writes alone; where answers are verified, that decides nothing.
    """

    def __init__(self, pair: Path, config: RuntimeConfig, scored: bool) -> None:
        self.llm, self.meter, self._scored = LLM(pair, config), EnergyMeter(), scored
        with TemporaryDirectory() as folder:
            for name in ROLES:
                (Path(folder) / name).symlink_to((pair / "auxiliary").resolve())
            (Path(folder) / "pair.json").write_bytes((pair / "pair.json").read_bytes())
            self._auxiliary = LLM(Path(folder), config)

    def warm_up(self, setting: Setting, prompt: Ids) -> None:
        """Answer something short; on a GPU, all blocks are captured now."""
        llm, params = self._auxiliary if setting.alone else self.llm, replace(setting.params, seed=0)
        llm.record([params])
        answer(llm, llm.requests(prompt, replace(params, max_tokens=min(8, params.max_tokens or 8))))

    def write(self, setting: Setting, prompts: Sequence[Ids], seeds: Sequence[int], timed: bool) -> list[Answer]:
        """Answers to prompts, each with its seed, decoded at once; `timed` for a single one, to say what it took."""
        llm = self._auxiliary if setting.alone else self.llm
        follows = setting.params.follows_load  # as users have it; with a seed, such drafts do not look at the clock
        both = [(prompt, None if follows else seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        requests = [one for prompt, seed in both for one in llm.requests(prompt, replace(setting.params, seed=seed))]
        self.meter.begin()
        results, seconds = answer(llm, requests)
        joules = self.meter.end()
        made = [
            Answer(
                *(r.token_ids, r.text, r.statistics.target_passes, _nll(r.logprobs)),
                thinking_tokens=r.statistics.thinking_tokens,
                thinking_passes=r.statistics.thinking_passes,
            )
            for r in results
        ]
        if setting.alone:
            scores = self.target_scores(prompts, [one.tokens for one in made]) if self._scored else [[]] * len(made)
            nlls = [_nll([score.logprob for score in own]) for own in scores]
            made = [replace(one, passes=0, nll=nll) for one, nll in zip(made, nlls, strict=True)]
        return [replace(made[0], seconds=seconds, joules=joules)] if timed else made

    def target_scores(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> list[list[TokenScore]]:
        """What the target says of each token of texts, which stand behind prompts."""
        asked = DecodingParams(method="sample", max_tokens=0, prompt_logprobs=0)
        results = self.llm.generate([[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)], asked)
        return [own.prompt_logprobs[len(prompt) - 1 :] for prompt, own in zip(prompts, results, strict=True)]


def _nll(log_probs: Sequence[float]) -> float | None:
    return -float(np.mean(log_probs)) if log_probs else None


def choose_drafts(writers: Writers, settings: Sequence[Setting], prompts: Sequence[Ids], store: Store) -> list[Setting]:
    """The settings, each with the draft that gives most tokens per second on development prompts.

    All drafts of a setting take turns on each prompt, one answer each. What was chosen is kept in the store.
    """
    chosen = []
    for setting in tqdm(settings, "drafts", **SHOWN):
        tried = [replace(setting, params=params) for params in setting.drafts]
        key = json.dumps(["fastest", len(prompts), [one.description for one in tried]], sort_keys=True)
        if len(tried) > 1 and store.kept(key) is None:
            store.keep(key, _fastest(writers, tried, prompts))
        chosen.append(tried[store.kept(key) or 0])
    return chosen


def _fastest(writers: Writers, settings: Sequence[Setting], prompts: Sequence[Ids]) -> int:
    """The number of the setting that gives most tokens per second."""
    tokens, seconds = np.zeros((2, len(settings)))
    for setting in settings:
        writers.warm_up(setting, prompts[0])
    for number, prompt in enumerate(prompts):
        for turn in range(len(settings)):
            at = (number + turn) % len(settings)
            (one,) = writers.write(settings[at], [prompt], [number], timed=True)
            tokens[at] += len(one.tokens)
            seconds[at] += one.seconds or math.nan
    return int((tokens / seconds).argmax())


def write_answers(
    writers: Writers, settings: Sequence[Setting], task: PromptSet, prompts: Mapping[int, Ids], timed: int, store: Store
) -> dict[str, list[list[Answer]]]:
    """Answers by label and prompt; a setting without randomness gives one to each.

    Args:
        task: the set.
        prompts: by number, those of the set that are answered.
        timed: how many of them are timed, the first ones.
        store: of answers; those that it has are not asked for again.
    """
    for setting in settings:
        writers.warm_up(setting, next(iter(prompts.values())))
    numbers, clocked = list(prompts), set(list(prompts)[:timed])

    def answered(setting: Setting, number: int) -> bool:
        kept = store.get(setting, task.prompts[number])
        return bool(kept) and not (number in clocked and kept[0].seconds is None)

    with tqdm(total=len(prompts) * len(settings), desc="answers", **SHOWN) as bar:
        for start in range(0, len(numbers), CHUNK):
            first: dict[tuple[str, int], list[Answer]] = {}
            chunk = numbers[start : start + CHUNK]
            for place, number in enumerate(one for one in chunk if one in clocked):
                for setting in _in_turn(settings, place):
                    if not answered(setting, number):
                        seeds = _seeds(setting, number, 1)
                        first[setting.label, number] = writers.write(setting, [prompts[number]], seeds, timed=True)
            for setting in _in_turn(settings, start // CHUNK):
                lacking = [number for number in chunk if not answered(setting, number)]
                made = {number: first.get((setting.label, number), []) for number in lacking}
                texts = 1 if setting.deterministic else task.answers
                asked = [(n, seed) for n in lacking for seed in _seeds(setting, n, texts)[len(made[n]) :]]
                given = [prompts[number] for number, _ in asked]
                written = writers.write(setting, given, [seed for _, seed in asked], timed=False) if asked else []
                for (number, _), one in zip(asked, written, strict=True):
                    made[number].append(one)
                for number, own in made.items():
                    store.add(setting, task.prompts[number], own)
                bar.update(len(chunk))
    return {one.label: [store.get(one, task.prompts[number]) for number in numbers] for one in settings}


def _in_turn(settings: Sequence[Setting], place: int) -> list[Setting]:
    """All settings, from another one on at each place."""
    at = place % len(settings)
    return [*settings[at:], *settings[:at]]


def _seeds(setting: Setting, number: int, count: int) -> list[int]:
    """Of the answers of a setting to the prompt of a number."""
    first = 8 if setting.again else 0  # no prompt has more answers
    return [(seed << 32) + number for seed in range(first, first + count)]


def verify(task: PromptSet, numbers: Sequence[int], written: Sequence[Sequence[Answer]]) -> list[list[bool]] | None:
    """Whether the answers to some prompts are right, each different text looked at once; None where nothing is."""
    if task.verify is None:
        return None
    found = []
    for number, answers in zip(numbers, written, strict=True):
        right = {text: task.verify(number, text) for text in {one.text for one in answers}}
        found.append([right[one.text] for one in answers])
    return found


def fitting(llm: LLM, task: PromptSet, settings: Sequence[Setting]) -> dict[int, Ids]:
    """Token ids, by number, of the prompts that fit with every setting.

    Raises:
        InvalidInput: none does.
    """
    found: dict[int, Ids] = {}
    for number, prompt in enumerate(task.prompts):
        try:
            for setting in settings:
                found[number] = llm.requests(prompt, setting.params)[0].prompt
        except CapacityExceeded:
            found.pop(number, None)
    if not found:
        raise InvalidInput("set", task.name, "no prompt fits the pair's capacity; export it with a larger one")
    return found


def describe(pair: Path, task: PromptSet) -> dict[str, str]:
    """What all answers in a file have in common: the pair's checkpoints and precisions, answers to each prompt."""
    specs = {name: read_spec(pair / name) for name in ROLES}
    engines = {name: f"{spec.checkpoint_hash} {spec.precision}" for name, spec in specs.items()}
    return {"answers": str(task.answers), **engines}
