"""Settings of a pair measured against `sample` and `speculative`: one run, all of them in turns on each prompt."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime import LLM, DecodingParams
from runtime.prompts import Prompt
from runtime.scheduler.request import Result

Floats = npt.NDArray[np.float64]
Values = tuple[tuple[str, Any], ...]
"""A setting: parameters and their values."""

Right = Callable[[int, str], bool | None] | None
"""Whether a text answers the prompt of that number; None where no right answer is known."""
Progress = Callable[[int, int], None]
"""Called with the answers given so far, and how many there will be."""

BASES = ("sample", "speculative")


@dataclass(frozen=True)
class Measurement:
    """How settings are measured: on which texts of each prompt, by their seeds, and who hears of it."""

    seeds: range
    right: Right
    progress: Progress


@dataclass(frozen=True)
class Point:
    """One setting's figures; `_error` is a standard error over prompts, of the paired ratio or difference.

    Attributes:
        values: the setting.
        tokens_per_second: decoding alone, one request at a time.
        speed, speed_error: tokens/s as a multiple of `sample`'s.
        speed_vs_speculative: tokens/s as a multiple of `speculative`'s.
        perplexity: exp of the mean over texts of their mean negative log-likelihood a token, under the target.
        perplexity_ratio, perplexity_ratio_error: against `sample`'s.
        accuracy: share of right answers; None where none are known. `accuracy_gain`: less `sample`'s.
        block_efficiency: tokens a target pass.
        acceptance_rate: accepted / drafted tokens.
        distinct_2: different pairs of tokens / pairs of a text; `distinct_ratio`: against `sample`'s.
    """

    values: dict[str, Any]
    tokens_per_second: float
    speed: float
    speed_error: float
    speed_vs_speculative: float
    perplexity: float
    perplexity_ratio: float
    perplexity_ratio_error: float
    accuracy: float | None
    accuracy_gain: float | None
    accuracy_gain_error: float | None
    block_efficiency: float
    acceptance_rate: float
    distinct_2: float
    distinct_ratio: float


def jackknife(left_out: Floats) -> float:
    """Standard error of a figure from its values with each of n independent parts left out, [n]; nan for n < 2."""
    n = len(left_out)
    return math.sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum())) if n > 1 else math.nan


def distinct(tokens: Sequence[int], n: int) -> float | None:
    """Different n-grams / n-grams of a text (distinct-n); None for fewer than n tokens."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


_COLUMNS = ("tokens", "seconds", "passes", "drafted", "accepted", "nll", "right", "distinct")


def measure(
    llm: LLM, prompts: Sequence[str], base: DecodingParams, settings: Sequence[Values], measurement: Measurement
) -> dict[Values, Point]:
    """Points of the settings, from one run in which they and `BASES` take turns."""
    compared: dict[Any, DecodingParams] = {values: replace(base, **dict(values)) for values in settings}
    sums = _run(llm, prompts, {**_bases(base), **compared}, measurement)
    return {values: _point(dict(values), sums[values], sums["sample"], sums["speculative"]) for values in settings}


def compare(
    llm: LLM, prompts: Sequence[str], now: DecodingParams, choice: DecodingParams, measurement: Measurement
) -> tuple[Point, Point]:
    """Two settings in one run: the figures of `now`, as `measure` gives them, and those of `choice` relative to `now`.

    Its seeds are such as the search has not used: a choice is the luckiest of many on the search's own texts.
    """
    sums = _run(llm, prompts, {**_bases(choice), "now": now, "choice": choice}, measurement)
    before = _point({}, sums["now"], sums["sample"], sums["speculative"])
    return before, _point({}, sums["choice"], sums["now"], sums["speculative"])


def _bases(params: DecodingParams) -> dict[Any, DecodingParams]:
    return {name: replace(params, method=name) for name in BASES}


def _run(
    llm: LLM, prompts: Sequence[str], compared: Mapping[Any, DecodingParams], measurement: Measurement
) -> dict[Any, dict[str, Floats]]:
    """Sums per prompt of each setting's columns, float64 [prompts]; the settings take turns on each prompt."""
    compared = {key: replace(params, speculation="fixed", n=1) for key, params in compared.items()}
    keys, total = list(compared), len(prompts) * len(measurement.seeds) * len(compared)
    right = measurement.right if measurement.right is not None and measurement.right(0, "") is not None else None
    sums = {key: {name: np.zeros(len(prompts)) for name in _COLUMNS} for key in keys}
    llm.record(list(compared.values()))  # else the first answers would have their blocks captured
    for params in compared.values():  # warm-up
        short = replace(params, seed=0, max_tokens=min(8, params.max_tokens), min_tokens=0)
        answer(llm, prompts[:1], [short])
    done = itertools.count(1)
    for number, (at, seed) in enumerate(itertools.product(range(len(prompts)), measurement.seeds)):
        turn = number % len(keys)
        for key in keys[turn:] + keys[:turn]:
            (result,), seconds = answer(llm, [prompts[at]], [replace(compared[key], seed=(seed << 32) + at)])
            s, own = result.statistics, sums[key]
            pairs = distinct(result.token_ids, 2)
            values = (
                len(result.token_ids),
                seconds,
                s.target_passes,
                s.drafted,
                s.accepted,
                -sum(result.logprobs) / len(result.logprobs) / len(measurement.seeds),
                bool(right(at, result.text)) / len(measurement.seeds) if right else math.nan,
                (1.0 if pairs is None else pairs) / len(measurement.seeds),
            )
            for name, value in zip(_COLUMNS, values, strict=True):
                own[name][at] += value
            measurement.progress(next(done), total)
    return sums


def _point(
    values: dict[str, Any],
    own: Mapping[str, Floats],
    sample: Mapping[str, Floats],
    speculative: Mapping[str, Floats],
) -> Point:
    def rate(columns: Mapping[str, Floats]) -> float:
        return float(columns["tokens"].sum() / columns["seconds"].sum())

    def rates_without(columns: Mapping[str, Floats]) -> Floats:
        tokens, seconds = columns["tokens"], columns["seconds"]
        left: Floats = (tokens.sum() - tokens) / (seconds.sum() - seconds)
        return left

    def error(difference: Floats) -> float:
        return float(difference.std(ddof=1) / math.sqrt(len(difference)))

    known = not np.isnan(own["right"]).any()
    nll, gain = own["nll"] - sample["nll"], own["right"] - sample["right"]
    ratio = math.exp(nll.mean())
    return Point(
        values=values,
        tokens_per_second=rate(own),
        speed=rate(own) / rate(sample),
        speed_error=jackknife(rates_without(own) / rates_without(sample)),
        speed_vs_speculative=rate(own) / rate(speculative),
        perplexity=math.exp(own["nll"].mean()),
        perplexity_ratio=ratio,
        perplexity_ratio_error=ratio * error(nll),
        accuracy=float(own["right"].mean()) if known else None,
        accuracy_gain=float(gain.mean()) if known else None,
        accuracy_gain_error=error(gain) if known else None,
        block_efficiency=float(own["tokens"].sum() / own["passes"].sum()),
        acceptance_rate=float(own["accepted"].sum() / own["drafted"].sum()) if own["drafted"].any() else 0.0,
        distinct_2=float(own["distinct"].mean()),
        distinct_ratio=float(own["distinct"].mean() / sample["distinct"].mean()),
    )


def answer(llm: LLM, prompts: Sequence[Prompt], params: Sequence[DecodingParams]) -> tuple[list[Result], float]:
    """Decode prompts at once, as far as the engines have rows.

    Args:
        llm: an idle pair, for this call alone.
        prompts: text or token ids.

    Returns:
        results in the prompts' order, and seconds of decoding: neither storing the prompts nor tokenising is in them,
            also on an engine that would compute prompts beside a block.

    Raises:
        InvalidInput: a prompt or parameter is unusable; nothing was run.
        RequestFailed: something broke under one of them.
    """
    made = [request for prompt, own in zip(prompts, params, strict=True) for request in llm.requests(prompt, own)]
    started = time.perf_counter()
    llm.loop.prompts_apart = True
    try:
        llm.submit(*made)
        while any(request.finish_reason is None for request in made):
            llm.step()
    finally:
        llm.loop.prompts_apart = False
    seconds = time.perf_counter() - started - sum(request.statistics.prefill_seconds for request in made)
    return [llm.result(request) for request in made], seconds
