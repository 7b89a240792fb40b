"""How many drafted tokens were accepted, and what that says of the next draft. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

_WEIGHT = 8.0
"""Observations that an expectation counts for."""


class Lengths:
    """How many drafted tokens were accepted, as weights that fade. A draft accepted in full says nothing of its rest.

    Args:
        deepest: longest draft.
        memory: blocks after which an observation counts 1/e.
    """

    def __init__(self, deepest: int, memory: float) -> None:
        self._deepest, self._growth, self._unit = deepest, math.exp(1 / memory), 1.0
        self._stopped = [0.0] * (deepest + 1)
        self._whole = [0.0] * (deepest + 1)

    def add(self, drafted: int, accepted: int) -> None:
        """One row's block."""
        drafted = min(drafted, self._deepest)
        self._unit *= self._growth  # newer observations weigh more, instead of older ones less
        if accepted < drafted:
            self._stopped[accepted] += self._unit
        else:
            self._whole[drafted] += self._unit
        if self._unit > 1e9:
            self.fade(1.0)

    def fade(self, factor: float) -> None:
        """Give all observations so far `factor` of their weight."""
        scale = factor / self._unit
        self._stopped = [weight * scale for weight in self._stopped]
        self._whole = [weight * scale for weight in self._whole]
        self._unit = 1.0

    def total(self) -> float:
        """Blocks observed, faded."""
        return (sum(self._stopped) + sum(self._whole)) / self._unit

    def counts(self) -> tuple[list[float], list[float]]:
        """For each depth 1, 2, ..: how often the tokens before were accepted and this one drafted; and accepted."""
        trials, successes, reached = [], [], 0.0
        for depth in range(self._deepest, 0, -1):
            reached += self._whole[depth]
            successes.append(reached / self._unit)
            reached += self._stopped[depth - 1]
            trials.append(reached / self._unit)
        return trials[::-1], successes[::-1]

    def conditional(self, prior: Sequence[float]) -> list[float]:
        """Acceptance at each depth given that all before were accepted, on top of `prior`."""
        trials, successes = self.counts()
        whole = surprise(trials, successes, prior)
        if whole != 1.0:
            prior = [shift(rate, whole) for rate in prior]
        return [(s + _WEIGHT * rate) / (t + _WEIGHT) for t, s, rate in zip(trials, successes, prior, strict=True)]


def surprise(trials: Sequence[float], successes: Sequence[float], expected: Sequence[float]) -> float:
    """Factor on the odds of acceptance by which observations differ from expectation, drawn towards 1."""
    tried, passed, hoped = sum(trials), sum(successes), sum(map(mul, trials, expected))
    if tried <= 0:
        return 1.0
    rate = min(max(hoped / tried, 0.01), 0.99)
    won, lost = (passed + _WEIGHT * rate), (tried - passed + _WEIGHT * (1 - rate))
    odds: float = won / lost * (1 - rate) / rate
    return odds


def shift(rate: float, odds: float) -> float:
    """The probability whose odds are `odds` times those of `rate`."""
    return rate * odds / (rate * odds + 1 - rate)
