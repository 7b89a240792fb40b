"""Random numbers that are not drawn: a function of them is run once for every outcome of its comparisons.

Rules and draws compare uniform numbers, scaled and shifted, with bounds, so what they return is piecewise constant, and
its exact law is found without a sample. The functions must not be compiled, see `uncompiled`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

from numba import config

T = TypeVar("T")

SLIVER = 1e-7
"""Outcomes that are less probable than this are left out: guards against rounding make such."""

PARTS = ("distribution", "filters", "draft", "random", "batch", "block", "lookup", "rules.scored")


@cache
def uncompiled() -> SimpleNamespace:
    """The modules of `mtad` with functions that numba would compile, imported anew without it."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "mtad"}
    before, config.DISABLE_JIT = config.DISABLE_JIT, True
    try:
        return SimpleNamespace(**{part.replace(".", "_"): importlib.import_module(f"mtad.{part}") for part in PARTS})
    finally:
        config.DISABLE_JIT = before
        for name in [name for name in sys.modules if name.split(".")[0] == "mtad"]:
            del sys.modules[name]
        sys.modules.update(kept)


class Numbers:
    """The uniform numbers of one run; its comparisons follow a script, and others are left for later."""

    def __init__(self, script: list[bool], later: list[list[bool]]) -> None:
        self._script, self._later, self._made = script, later, list[bool]()
        self._intervals: list[list[float]] = []

    def __call__(self, count: int) -> list[Uniform]:
        """So many independent numbers from [0, 1)."""
        intervals = [[0.0, 1.0] for _ in range(count)]
        self._intervals += intervals
        return [Uniform(self, interval, 1.0, 0.0) for interval in intervals]

    @property
    def chance(self) -> float:
        """The probability of the outcomes so far."""
        found = 1.0
        for low, high in self._intervals:
            found *= high - low
        return found

    def split(self, interval: list[float], bound: float, equal: bool) -> bool:
        """Whether a number of an interval is below a bound, or equal to it; the interval becomes those of which it is.

        The least number of an interval is an outcome of its own where only equality lets it pass.
        """
        low, high = interval
        touches = equal and bound == low
        if bound < low or (bound - low < SLIVER and not touches):
            return False
        if high - bound < SLIVER:
            return True
        at = len(self._made)
        if at >= len(self._script):
            self._later.append([*self._made, False])
        self._made.append(at >= len(self._script) or self._script[at])
        interval[:] = (low, bound) if self._made[-1] else (bound, high)
        return self._made[-1]


class Uniform:
    """`scale` times a number that is not drawn, plus `shift`."""

    __array_ufunc__ = None  # so that NumPy's numbers leave comparisons to it

    def __init__(self, run: Numbers, interval: list[float], scale: float, shift: float) -> None:
        self._run, self._interval, self._scale, self._shift = run, interval, float(scale), float(shift)

    def __mul__(self, other: float) -> Uniform:
        return Uniform(self._run, self._interval, self._scale * other, self._shift * other)

    def __truediv__(self, other: float) -> Uniform:
        return self * (1 / other)

    def __sub__(self, other: float) -> Uniform:
        return Uniform(self._run, self._interval, self._scale, self._shift - other)

    __rmul__ = __mul__

    def __lt__(self, other: float) -> bool:
        return self._below(other, False)

    def __le__(self, other: float) -> bool:
        return self._below(other, True)

    def __gt__(self, other: float) -> bool:
        return not self._below(other, True)

    def __ge__(self, other: float) -> bool:
        return not self._below(other, False)

    def _below(self, bound: float, equal: bool) -> bool:
        if self._scale == 0:
            return self._shift <= bound if equal else self._shift < bound
        return self._run.split(self._interval, (float(bound) - self._shift) / self._scale, equal)


def outcomes(function: Callable[[Any], T]) -> Iterator[tuple[float, T]]:
    """What a function of `Numbers` returns, in all cases, each with its probability."""
    waiting: list[list[bool]] = [[]]
    while waiting:
        numbers = Numbers(waiting.pop(), waiting)
        yield_value = function(numbers)
        yield numbers.chance, yield_value
