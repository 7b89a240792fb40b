"""Every setting on every prompt, in turns, with the draft that suits it best.

Settings take turns on each prompt, in an order that rotates, so that whatever else the machine does falls on all of
them alike. The first answer to each of the first prompts is decoded alone, and timed; a prompt's other answers are
decoded at once, which gives the same law (and on ONNX Runtime's CPU provider the same tokens).
"""

from __future__ import annotations

import hashlib
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
from mtad.errors import CapacityExceeded, InvalidInput
from mtad.params import DecodingParams
from runtime import LLM, RuntimeConfig
from runtime.pair import ROLES
from runtime.scheduler.request import TokenScore
from runtime.tuning.measure import answer, law_change
from scripts.energy import EnergyMeter
from scripts.evaluation.answers import Answer, Store
from scripts.evaluation.prompts import PromptSet
from scripts.evaluation.settings import Setting

Ids = Sequence[int]
SHOWN = {"file": sys.stderr, "unit": "setting", "mininterval": 0.5 if sys.stderr.isatty() else 30.0}


class Writers:
    """The pair, and its auxiliary opened as a pair of which it is the target.

    Args:
        pair: folder.
        config: how both run.
    """

    def __init__(self, pair: Path, config: RuntimeConfig) -> None:
        self.llm, self.meter = LLM(pair, config), EnergyMeter()
        with TemporaryDirectory() as folder:
            for name in ROLES:
                (Path(folder) / name).symlink_to((pair / "auxiliary").resolve())
            (Path(folder) / "pair.json").write_bytes((pair / "pair.json").read_bytes())
            self._auxiliary = LLM(Path(folder), config)

    def warm_up(self, setting: Setting, prompt: Ids) -> None:
        """Answer something short; on a GPU, all blocks are captured now."""
        llm, params = self._auxiliary if setting.alone else self.llm, replace(setting.params, seed=0)
        llm.record([params])
        answer(llm, [prompt], [replace(params, max_tokens=min(8, params.max_tokens))])

    def write(self, setting: Setting, prompt: Ids, seeds: Sequence[int], timed: bool) -> list[Answer]:
        """Answers to a prompt, one per seed, decoded at once; `timed` for one seed, to say what it took."""
        llm = self._auxiliary if setting.alone else self.llm
        params = [replace(setting.params, seed=seed) for seed in seeds]
        self.meter.begin()
        results, seconds = answer(llm, [prompt] * len(seeds), params)
        joules = self.meter.end()
        made = []
        for result in results:
            tokens, log_probs, passes = result.token_ids, result.logprobs, result.statistics.target_passes
            if setting.alone:
                log_probs, passes = [score.logprob for score in self._target_scores(prompt, tokens)], 0
            made.append(Answer(tokens, result.text, passes, -float(np.mean(log_probs))))
        return [replace(made[0], seconds=seconds, joules=joules)] if timed else made

    def with_law_change(self, setting: Setting, prompt: Ids, one: Answer) -> Answer:
        """The answer, with `changed` where the setting is lossless."""
        if not setting.lossless:
            return one
        return replace(one, changed=float(law_change(self.llm, prompt, one.tokens, setting.params).mean()))

    def _target_scores(self, prompt: Ids, tokens: Ids) -> list[TokenScore]:
        """What the target says of each token behind a prompt."""
        asked = DecodingParams(method="sample", max_tokens=0, prompt_logprobs=0)
        (result,) = self.llm.generate([[*prompt, *tokens]], asked)
        return result.prompt_logprobs[len(prompt) - 1 :]


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
            (one,) = writers.write(settings[at], prompt, [number], timed=True)
            tokens[at] += len(one.tokens)
            seconds[at] += one.seconds or math.nan
    return int((tokens / seconds).argmax())


def write_answers(
    writers: Writers, settings: Sequence[Setting], prompts: Mapping[int, Ids], count: int, timed: int, store: Store
) -> dict[str, list[list[Answer]]]:
    """Answers by label and prompt; a setting without randomness gives one to each.

    Args:
        prompts: by number.
        count: answers to each prompt.
        timed: how many prompts are timed, the first ones.
        store: of answers; those that it has are not asked for again.
    """
    for setting in settings:
        writers.warm_up(setting, next(iter(prompts.values())))
    written: dict[str, list[list[Answer]]] = {setting.label: [] for setting in settings}
    with tqdm(total=len(prompts) * len(settings), desc="answers", **SHOWN) as bar:
        for place, (number, prompt) in enumerate(prompts.items()):
            for turn in range(len(settings)):
                setting, clocked = settings[(place + turn) % len(settings)], place < timed
                kept, first_seed = store.get(setting, number), count if setting.again else 0
                if not kept or (clocked and kept[0].seconds is None):
                    texts = 1 if setting.deterministic else count
                    seeds = [(seed << 32) + number for seed in range(first_seed, first_seed + texts)]
                    first, rest = (seeds[:1], seeds[1:]) if clocked else ([], seeds)
                    kept = writers.write(setting, prompt, first, timed=True) if first else []
                    kept = [writers.with_law_change(setting, prompt, one) for one in kept]
                    kept += writers.write(setting, prompt, rest, timed=False) if rest else []
                    store.add(setting, number, kept)
                written[setting.label].append(kept)
                bar.update()
    return written


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
    """What all answers of a run have in common: the pair's checkpoints and precisions, the prompts."""
    prompts = hashlib.sha256(json.dumps(list(task.prompts)).encode()).hexdigest()
    specs = {name: read_spec(pair / name) for name in ROLES}
    engines = {name: f"{spec.checkpoint_hash} {spec.precision}" for name, spec in specs.items()}
    return {"set": task.name, "prompts": prompts, "answers": str(task.answers), **engines}
