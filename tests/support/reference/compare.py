"""How a definition decides: every comparison that rounding could turn goes through here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

watchers: list[Callable[[float, float], None]] = []
"""They are given both sides of every comparison: tests want to know how close a call was."""


def exceeds(left: float, right: float) -> bool:
    """Whether `left > right`."""
    for watch in watchers:
        watch(left, right)
    return left > right


def ranked(scored: Iterable[tuple[float, T]], count: int = 1) -> list[T]:
    """Of pairs of a score and something, the somethings with the `count` largest scores, in order."""
    order = sorted(scored, key=lambda pair: -pair[0])
    for (above, _), (below, _) in itertools.pairwise(order[: count + 1]):
        exceeds(above, below)
    return [something for _, something in order[:count]]
