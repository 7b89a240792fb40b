"""Figures of each setting, with errors over prompts.

Every figure is N / D, or exp(N / D), of sums over prompts. A weight per prompt then gives a figure over any of them:
over all, over all but one (delete-one jackknife: the errors, of comparisons too, which leave out the same prompt on
both sides), or over a bootstrap's draw. All answers to a prompt stay together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.tuning.measure import BEGINNING, distinct, jackknife
from scripts.evaluation.answers import Answer

Floats = npt.NDArray[np.float64]
OF_SELF_BLEU = 4
"""Answers per prompt that self-BLEU compares."""
TRIES = (1, 8)
"""k of pass@k."""


@dataclass(frozen=True)
class Figure:
    """N and D of each prompt, [prompts]."""

    top: Floats
    bottom: Floats
    exponential: bool = False

    def over(self, weights: Floats) -> Floats:
        """The figure over prompts with these weights, [.., prompts]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio: Floats = (weights @ self.top) / (weights @ self.bottom)
        return np.exp(ratio) if self.exponential else ratio

    def left_out(self) -> Floats:
        """Without each prompt."""
        return self.over(1 - np.eye(len(self.top)))

    def with_error(self) -> dict[str, float]:
        """`value` and `error`."""
        return {"value": float(self.over(np.ones(len(self.top)))), "error": jackknife(self.left_out())}

    def relative(self, other: Figure) -> dict[str, float]:
        """The ratio to another setting's, paired over prompts: `value` and `error`."""
        every = np.ones(len(self.top))
        value = float(self.over(every) / other.over(every))
        return {"value": value, "error": jackknife(self.left_out() / other.left_out())}


def figures_of(prompts: Sequence[Sequence[Answer]], right: Sequence[Sequence[bool]] | None) -> dict[str, Figure]:
    """Figures of one setting, by name; those that it does not have are left out.

    Args:
        prompts: answers to each prompt.
        right: whether each answer is right; None where nothing is right or wrong.
    """

    def sums(top: Callable[[Answer], float], bottom: Callable[[Answer], float], exponential: bool = False) -> Figure:
        parts = [[(top(one), bottom(one)) for one in own if bottom(one)] for own in prompts]
        of = [np.array([sum(part[at] for part in own) for own in parts], np.float64) for at in (0, 1)]
        return Figure(of[0], of[1], exponential)

    def count(one: Answer) -> int:
        return len(one.tokens)

    def metered(one: Answer) -> int:
        return count(one) * (one.joules is not None)

    def thought(one: Answer) -> bool:
        """Whether it has a thought, written by the target; the auxiliary alone takes no pass of it."""
        return bool(one.passes and one.thinking_passes)

    found = {
        "tokens_per_pass": sums(count, lambda one: one.passes),
        "tokens_per_second": sums(count, lambda one: one.seconds or 0.0),
        "thinking": sums(lambda one: one.thinking_tokens, lambda one: one.thinking_passes * thought(one)),
        "answering": sums(
            lambda one: (count(one) - one.thinking_tokens) * thought(one),
            lambda one: (one.passes - one.thinking_passes) * thought(one),
        ),
        "perplexity": sums(lambda one: one.nll or 0.0, lambda one: one.nll is not None, exponential=True),
        "distinct_2": sums(lambda one: distinct(one.tokens[:BEGINNING], 2) or 0.0, lambda one: count(one) > 1),
        "self_bleu": _mean([self_bleu([one.tokens[:BEGINNING] for one in own[:OF_SELF_BLEU]]) for own in prompts]),
        "tokens": sums(count, lambda _: 1.0),
        "joules_per_token": sums(lambda one: one.joules or 0.0, metered),
    }
    for k in TRIES if right else ():
        tries = [[own[0]] * k if len(own) == 1 else own for own in right or ()]  # one answer stands for all its like
        if all(len(own) >= k for own in tries):
            found[f"pass@{k}"] = _mean([pass_at_k(len(own), sum(own), k) for own in tries])
    return {name: figure for name, figure in found.items() if figure.bottom.any()}


def _mean(values: Sequence[float]) -> Figure:
    return Figure(np.array(values, np.float64), np.ones(len(values)))


def pass_at_k(count: int, right: int, k: int) -> float:
    """Chance that one of k answers is right, estimated without bias from `count`, at least k, of which `right` are."""
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def self_bleu(texts: Sequence[Sequence[int]]) -> float:
    """Mean BLEU of each text against the others (Texygen, arXiv 1802.01886), over tokens; 1 for a single text.

    The less the texts of a prompt differ, the higher. It is BLEU-4 of a sentence: n-grams that the text is long enough
    for, precisions of two and more tokens smoothed by adding one (Lin and Och 2004), the closest reference's length.
    """
    if len(texts) == 1:
        return 1.0
    return sum(_bleu(text, [*texts[:at], *texts[at + 1 :]]) for at, text in enumerate(texts)) / len(texts)


def _bleu(text: Sequence[int], references: Sequence[Sequence[int]]) -> float:
    logs = []
    for n in range(1, min(4, len(text)) + 1):
        own, most = _grams(text, n), Counter[tuple[int, ...]]()
        for reference in references:
            most |= _grams(reference, n)
        hits, smooth = sum((own & most).values()), n > 1
        if not hits and not smooth:
            return 0.0
        logs.append(math.log((hits + smooth) / (own.total() + smooth)))
    closest = min((len(one) for one in references), key=lambda length: (abs(length - len(text)), length))
    return math.exp(sum(logs) / len(logs) + min(0.0, 1 - closest / len(text)))


def _grams(text: Sequence[int], n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text[at : at + n]) for at in range(len(text) - n + 1))


def summary(figures: Mapping[str, Figure], reference: Mapping[str, Figure]) -> dict[str, Any]:
    """All figures of a setting with their errors, and its speed as a multiple of the reference's."""
    found: dict[str, Any] = {name: figure.with_error() for name, figure in figures.items()}
    speed = "tokens_per_second"
    if speed in figures:
        found["speedup"] = figures[speed].relative(reference[speed])
    return found
