"""Every setting on every prompt, in turns."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from mtad.params import DecodingParams
from runtime import LLM
from scripts.energy import EnergyMeter
from scripts.evaluation.decoders import Answer, Decoder, Ids, Ours
from scripts.evaluation.figures import Scored, summarise
from scripts.evaluation.prompt_set import PromptSet
from scripts.evaluation.store import SetStore


def measure(
    prompts: Sequence[Ids],
    decoders: Sequence[Decoder],
    seeds: Sequence[int],
    batch: int = 1,
    meter: EnergyMeter | None = None,
    label: str = "",
    store: SetStore | None = None,
    timed: int | None = None,
) -> dict[str, list[Answer]]:
    """Answers by label.

    For each group of prompts and each seed all settings run one after another, in an order that rotates, so that
    whatever else the machine does falls on all of them alike. Settings without randomness run with the first seed only.
    With `timed`, speed and energy are those of the first prompts, each decoded alone; other answers have none.

    Args:
        prompts: token ids.
        decoders: with labels of their own.
        seeds: the requests' seeds are made of these and the prompt's number, the same for all settings.
        batch: prompts a group, decoded at once.
        meter: of energy.
        label: shown at the progress bar.
        store: of answers; those that it has are not asked for again.
        timed: how many prompts are timed, with the first seed; None: all answers are, in groups.
    """
    answers: dict[str, list[Answer]] = {decoder.label: [] for decoder in decoders}
    alone = min(timed or 0, len(prompts))
    rounds = [(range(at, at + 1), 0) for at in range(alone)]
    for first, place in itertools.product(range(0, len(prompts), batch), range(len(seeds))):
        group = range(first if place else max(first, alone), min(first + batch, len(prompts)))
        rounds += [(group, place)] if group else []
    for decoder in decoders:
        decoder.warm_up([prompts[at] for at in rounds[-1][0]])
    total = sum(not (place and decoder.deterministic) for _, place in rounds for decoder in decoders)
    with tqdm(total=total, desc=label, unit="answer", file=sys.stderr) as bar:
        for number, (group, place) in enumerate(rounds):
            turn, seed, clocked = number % len(decoders), seeds[place], timed is None or number < alone
            for decoder in (*decoders[turn:], *decoders[:turn]):
                if decoder.deterministic and place:
                    continue
                known = store.get(decoder, group, place) if store else None
                if known and (not clocked or all(one.seconds for one in known)):
                    answers[decoder.label] += [replace(one, prompt=at) for at, one in zip(group, known, strict=True)]
                    bar.update()
                    continue
                if meter and clocked:
                    meter.begin()
                made = decoder.run([prompts[at] for at in group], [(seed << 32) + at for at in group])
                joules = meter.end() if meter and clocked else None
                share = None if joules is None else joules / len(group)
                given = [
                    replace(one, prompt=at, seed=place, joules=share) for at, one in zip(group, made(), strict=True)
                ]
                if not clocked:
                    given = [replace(one, seconds=0.0, timed_tokens=0) for one in given]
                answers[decoder.label] += given
                if store:
                    store.add(decoder, given)
                bar.update()
    return answers


def score(task: PromptSet, answers: Mapping[str, Sequence[Answer]]) -> dict[str, list[Scored]]:
    """Every answer with its verdict."""
    every = [(label, one) for label, own in answers.items() for one in own]
    scored: dict[str, list[Scored]] = {label: [] for label in answers}
    shown = {"total": len(every), "desc": f"{task.name}: scoring", "unit": "answer", "file": sys.stderr}
    with ThreadPoolExecutor(task.workers) as pool:
        verdicts = pool.map(lambda entry: task.right(entry[1].prompt, entry[1].text), every)
        for (label, one), right in zip(every, tqdm(verdicts, disable=not task.scored, **shown), strict=True):
            scored[label].append(Scored(one, right))
    return scored


def compare(
    llm: LLM, task: PromptSet, settings: Mapping[str, DecodingParams], first_seed: int = 0, label: str = ""
) -> dict[str, Any]:
    """Figures of this package's settings on a set of prompts, one answer each; see `figures.summarise`."""
    ids = [list(llm.pair.tokenizer(prompt.text).input_ids) for prompt in task.prompts]
    decoders = [Ours(name, llm, params) for name, params in settings.items()]
    return summarise(score(task, measure(ids, decoders, [first_seed], label=label or task.name)))
