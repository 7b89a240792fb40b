"""What is compared: this package's methods and Hugging Face's, through one call that answers a few prompts, timed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mtad.params import DecodingParams
from runtime import LLM, Result
from runtime.speculation.planner import variants
from runtime.tuning.measure import answer
from scripts import systems
from scripts.systems import HuggingFace

Ids = Sequence[int]


@dataclass(frozen=True)
class Answer:
    """One text.

    Attributes:
        prompt, seed: the prompt's number in its set, and which of the seeds.
        tokens: new tokens up to and including the end of the text.
        text: without stop strings and special tokens.
        seconds: decoding time; storing the prompt, tokenising and scoring are not in it.
        timed_tokens: tokens that `seconds` were spent on.
        passes: passes of the target that gave tokens.
        drafted, accepted: tokens of the draft's path, and those kept; None where a system does not say.
        nll: mean negative log-likelihood a token under the target, temperature 1, unprocessed; nats.
        joules: energy of the whole answer, prompt included; None without a meter.
    """

    prompt: int
    seed: int
    tokens: tuple[int, ...]
    text: str
    seconds: float
    timed_tokens: int
    passes: int
    drafted: int | None
    accepted: int | None
    nll: float
    joules: float | None = None


class Decoder(ABC):
    """One labelled setting.

    Attributes:
        label: in tables.
        deterministic: whether every seed gives the same text, so that one is enough.
    """

    label: str
    deterministic: bool

    @abstractmethod
    def warm_up(self, prompts: Sequence[Ids]) -> None:
        """Answer something short."""

    @abstractmethod
    def run(self, prompts: Sequence[Ids], seeds: Sequence[int]) -> Callable[[], list[Answer]]:
        """Answer the prompts at once; only this call is metered. What it returns makes the answers, in order."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The setting, for the report."""


class Ours(Decoder):
    """A setting of this package.

    Args:
        label: in tables.
        llm: an idle pair.
        params: their seed is replaced.
    """

    def __init__(self, label: str, llm: LLM, params: DecodingParams) -> None:
        self.label, self.params, self._llm = label, params, llm
        self.deterministic = params.temperature == 0

    def warm_up(self, prompts: Sequence[Ids]) -> None:
        """On a GPU, all blocks of the setting are captured now, and none in an answer."""
        self._llm.record(variants(replace(self.params, seed=0)))
        short = replace(self.params, seed=0, max_tokens=min(16, self.params.max_tokens), min_tokens=0)
        for _ in range(2):
            answer(self._llm, prompts, [short] * len(prompts))

    def run(self, prompts: Sequence[Ids], seeds: Sequence[int]) -> Callable[[], list[Answer]]:
        results, seconds = answer(self._llm, prompts, [replace(self.params, seed=seed) for seed in seeds])
        return lambda: [_ours(result, seconds / len(results)) for result in results]

    def describe(self) -> dict[str, Any]:
        """The values that differ from the defaults, and the method."""
        plain, values = asdict(DecodingParams()), asdict(self.params)
        return {name: v for name, v in values.items() if name == "method" or (v != plain[name] and name != "seed")}


def _ours(result: Result, seconds: float) -> Answer:
    s, tokens = result.statistics, tuple(result.token_ids)
    drafted, accepted = (s.drafted, s.accepted) if s.drafted else (None, None)
    nll = -sum(result.logprobs) / len(result.logprobs)
    return Answer(0, 0, tokens, result.text, seconds, len(tokens), s.target_passes, drafted, accepted, nll)


class Baseline(Decoder):
    """Hugging Face `generate`: texts are scored by one more pass of its target.

    The first tokens come out of the pass that stores the prompt, so neither they nor that pass are in the speed.

    Args:
        label: in tables.
        system: with its search, see `scripts.systems.HuggingFace`.
        tokenizer: of both models.
        params: sampling parameters, `stop` and `max_tokens`.
    """

    def __init__(
        self, label: str, system: HuggingFace, tokenizer: PreTrainedTokenizerBase, params: DecodingParams
    ) -> None:
        self.label, self._system, self._tokenizer, self._params = label, system, tokenizer, params
        self.deterministic = not system.samples

    def warm_up(self, prompts: Sequence[Ids]) -> None:
        """Warm up, and find the best number of threads."""
        numbered = (systems.Prompt(number, tuple(ids)) for number, ids in cycle(enumerate(prompts)))
        self._system.begin(numbered, len(prompts), self._params)
        self._system.end()

    def run(self, prompts: Sequence[Ids], seeds: Sequence[int]) -> Callable[[], list[Answer]]:
        numbered = [systems.Prompt(number, tuple(ids)) for number, ids in enumerate(prompts)]
        torch.manual_seed(seeds[0])
        before = self._system.passes
        part = self._system.run(numbered, len(prompts), self._params)
        passes = self._system.passes - before
        size = min(len(prompts), self._system.largest or len(prompts))

        def made() -> list[Answer]:
            total = sum(len(one.tokens) for one in part.finished)
            answers = []
            for ids, one in zip(prompts, part.finished, strict=True):
                tokens, text = cut(one.tokens, self._params.stop_strings, self._tokenizer)
                timed = max(len(tokens) - one.first_tokens, 0)
                seconds = (one.whole - one.first) / size
                # in a batch the target's passes are shared; a prompt's own are as many as it would have had alone
                own = len(tokens) if size > 1 else round(passes * len(one.tokens) / total) or 1
                nll = mean_nll(self._system.model, ids, tokens)
                answers.append(Answer(0, 0, tuple(tokens), text, seconds, timed, own, None, None, nll))
            return answers

        return made

    def describe(self) -> dict[str, Any]:
        return {"huggingface": self._system.name, **self._system.describe()}


def cut(tokens: Sequence[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str]:
    """Tokens up to those that complete a stop string, and their text before it."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    found = [at for at in (text.find(string) for string in stop) if at >= 0]
    if not found:
        return list(tokens), text
    for count in range(1, len(tokens) + 1):
        if any(string in tokenizer.decode(tokens[:count], skip_special_tokens=True) for string in stop):
            return list(tokens[:count]), text[: min(found)]
    return list(tokens), text[: min(found)]


@torch.inference_mode()
def mean_nll(model: PreTrainedModel, prompt: Ids, tokens: Ids) -> float:
    """Mean negative log-likelihood a token of `tokens` after `prompt`, temperature 1, unprocessed; nats."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]))


def perplexity(nll: Sequence[float]) -> float:
    """Exp of the mean over texts of their mean negative log-likelihood a token."""
    return math.exp(sum(nll) / len(nll))
