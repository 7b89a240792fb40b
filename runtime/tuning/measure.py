"""Settings of a pair measured in one run, in which all of them take turns on each prompt, one request at a time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from engines.prompts import Example
from mtad.filters import filter_logits
from mtad.methods import METHODS
from mtad.params import DecodingParams
from mtad.rows import stack_rows
from runtime.llm import LLM
from runtime.scheduler.request import Request, Result

Floats = npt.NDArray[np.float64]

SURE, BEGINNING = 1.645, 32
"""Standard errors that make a loss sure at 5 %. Tokens of a text that distinct-2 sees: it depends on their number."""


class Texts(NamedTuple):
    """What one setting made of the prompts; each field is float64 [prompts].

    Attributes:
        seconds: of decoding alone.
        passes: of the target.
        nll: mean negative log-likelihood of a text's tokens under the target, in nats.
        filtered: by how much temperature and filters change the target's law, added up over tokens; see `law_change`.
        spent: by how much the method changes it further; 0 for a lossless one, NaN where nothing bounds it.
        right: 1 for the right answer, 0 for another one; NaN where none is known.
        distinct_2: different pairs of adjacent tokens / pairs, of the first `BEGINNING`.
    """

    tokens: Floats
    seconds: Floats
    passes: Floats
    nll: Floats
    filtered: Floats
    spent: Floats
    right: Floats
    distinct_2: Floats


def speedup(own: Texts, reference: Texts) -> float:
    """Tokens per second of decoding, as a multiple of the reference's."""
    return float(own.tokens.sum() / own.seconds.sum() * reference.seconds.sum() / reference.tokens.sum())


FIGURES: dict[str, Callable[[Texts, Texts], float]] = {
    "tokens/s": lambda own, sample: own.tokens.sum() / own.seconds.sum(),
    "x sample": speedup,
    "perplexity x sample": lambda own, sample: math.exp((own.nll - sample.nll).mean()),
    "distinct-2 x sample": lambda own, sample: own.distinct_2.mean() / sample.distinct_2.mean(),
    "accuracy": lambda own, sample: own.right.mean(),
    "accuracy gain": lambda own, sample: (own.right - sample.right).mean(),
    "tokens per pass": lambda own, sample: own.tokens.sum() / own.passes.sum(),
    "TV of filters": lambda own, sample: own.filtered.sum() / own.tokens.sum(),
    "TV of method": lambda own, sample: own.spent.sum() / own.tokens.sum(),
}
"""What is measured of a setting's texts, beside those of `sample` in the same run."""


@dataclass(frozen=True)
class Point:
    """A setting, what it made of the prompts, and its figures.

    Attributes:
        values: decoding parameters by name, the method among them.
        figures: `FIGURES`, each with its standard error over prompts; without those of which nothing is known.
    """

    values: dict[str, Any]
    texts: Texts
    figures: dict[str, tuple[float, float]]

    @property
    def quality_loss(self) -> float:
        """How much worse than `sample`'s the texts may be, at 5 %; 0 for a lossless method, by definition.

        The loss of accuracy where right answers are known; otherwise the larger one of the relative losses of
        perplexity and of distinct-2, because repetitive text has a low perplexity. `SURE` of its errors are added.
        """
        if METHODS[self.values["method"]].lossless:
            return 0.0
        if "accuracy gain" in self.figures:
            return SURE * self.figures["accuracy gain"][1] - self.figures["accuracy gain"][0]
        (likely, error), (varied, other) = (self.figures[f"{name} x sample"] for name in ("perplexity", "distinct-2"))
        return max(likely - 1 + SURE * error, 1 - varied + SURE * other)


def with_error(figure: Callable[[Texts, Texts], float], own: Texts, reference: Texts) -> tuple[float, float]:
    """A figure of the texts of at least two prompts, and its standard error over prompts."""
    left_out = [
        figure(*(Texts(*np.delete(texts, prompt, axis=1)) for texts in (own, reference)))
        for prompt in range(len(own.tokens))
    ]
    return float(figure(own, reference)), jackknife(np.array(left_out))


def jackknife(left_out: Floats) -> float:
    """Standard error of a figure from its values with each of n independent parts left out, [n]; nan for n < 2."""
    n = len(left_out)
    return math.sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum())) if n > 1 else math.nan


def distinct(tokens: Sequence[int], n: int) -> float | None:
    """Different n-grams / n-grams of a text (distinct-n); None for fewer than n tokens."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def measure(
    llm: LLM, examples: Sequence[Example], base: DecodingParams, values: Sequence[dict[str, Any]], seed: int, label: str
) -> list[Point]:
    """Measure settings and, as their reference, `sample`.

    Args:
        llm: an idle pair, for this call alone.
        examples: at least two.
        base: the parameters that all settings share.
        values: each setting's own.
        seed: another one gives other texts of the same prompts.
        label: what the bar of progress says.
    """
    fixed = replace(base, n=1)
    settings = [replace(fixed, method="sample"), *(replace(fixed, **own) for own in values)]
    llm.record(settings)  # otherwise the first answers would have their blocks captured
    for params in settings:
        short = replace(params, seed=0, max_tokens=min(8, params.max_tokens or 8), min_tokens=0)
        answer(llm, llm.requests(examples[0].prompt, short))
    rows: list[list[tuple[float, ...]]] = [[] for _ in settings]
    wait = 0.1 if sys.stderr.isatty() else 30.0  # seconds between two lines of a log file
    for number, example in enumerate(tqdm(examples, label, unit="prompt", file=sys.stderr, mininterval=wait)):
        for turn in range(len(settings)):
            index = (number + turn) % len(settings)
            asked = settings[index]  # with a seed, drafts that follow the clock would follow something else
            seeded = asked if asked.follows_load else replace(asked, seed=(seed << 32) + number)
            (result,), seconds = answer(llm, llm.requests(example.prompt, seeded))
            nll = -sum(result.logprobs) / len(result.logprobs)
            right, distinct_2 = example.right(result.text), distinct(result.token_ids[:BEGINNING], 2)
            changed, spec = law_change(llm, result.prompt_token_ids, result.token_ids, seeded).sum(), seeded.spec
            spent = 0.0 if spec.lossless else result.statistics.divergence_spent if spec.bounded else math.nan
            row = len(result.token_ids), seconds, result.statistics.target_passes, nll, changed, spent
            rows[index].append((*row, math.nan if right is None else right, 1.0 if distinct_2 is None else distinct_2))
    sample, *measured = (Texts(*np.array(own, np.float64).T) for own in rows)
    points = []
    for own, texts in zip(values, measured, strict=True):
        figures = {name: with_error(figure, texts, sample) for name, figure in FIGURES.items()}
        known = {name: found for name, found in figures.items() if not math.isnan(found[0])}
        points.append(Point(own, texts, known))
    return points


def answer(llm: LLM, requests: Sequence[Request]) -> tuple[list[Result], float]:
    """Decode requests at once, as far as the engines have rows; `llm` is idle, and for this call alone.

    Returns:
        results in the requests' order, and seconds of decoding: neither prefill nor tokenisation is in them, also on an
            engine that would run prompts beside a block.

    Raises:
        RequestFailed: something broke under one of them.
    """
    started = time.perf_counter()
    llm.loop.prompts_apart = True
    try:
        llm.loop.scheduler.submit(*requests)
        while any(request.finish_reason is None for request in requests):
            llm.step()
    finally:
        llm.loop.prompts_apart = False
    seconds = time.perf_counter() - started - sum(request.statistics.prefill_seconds for request in requests)
    return [Result.of(request) for request in requests], seconds


@torch.inference_mode()
def law_change(llm: LLM, prompt: Sequence[int], tokens: Sequence[int], params: DecodingParams) -> Floats:
    """`variation` of the target's law at each token of an answer, float64 [tokens]; `llm` is idle."""
    if (params.temperature, params.top_k, params.top_p, params.min_p) == (1, 0, 1, 0):
        return np.zeros(len(tokens))
    target, first, step = llm.loop.caches.target, len(prompt) - 1, llm.config.max_prefill_tokens
    for at in range(0, first, step):
        target.prefill(0, prompt[at : min(at + step, first)], at)
    changes = [variation(logits.cpu(), params) for logits in target.logits(0, [prompt[-1], *tokens[:-1]], first)]
    llm.loop.caches.release(0)
    return np.concatenate(changes)


def variation(logits: Tensor, params: DecodingParams) -> Floats:
    """Total variation between the law of logits, float32 [n, V], and what temperature and filters make of it: [n].

    It is half the sum over the vocabulary of |p_T - p|, and so what p_T has beyond p. Penalties, biases and constraints
    do not count.
    """
    row, vocab = stack_rows([replace(params, method="sample")], logits.shape[1])[0], logits.shape[1]
    ids, log_p, changes = np.empty(vocab, np.int32), np.empty(vocab, np.float32), list[float]()
    for own, p in zip(logits.numpy(), logits.double().softmax(-1).numpy(), strict=True):
        kept = filter_logits(own, row, ids, log_p)
        changes.append(np.maximum(np.exp(log_p[:kept]) - p[ids[:kept]], 0).sum())
    return np.array(changes)
