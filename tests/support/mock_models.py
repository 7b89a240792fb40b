"""Mock models, which are functions of the tokens so far, and how close the calls were that a definition made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.reference.compare import watchers
from tests.support.reference.request import Model, Tokens


class Pair(NamedTuple):
    """Two mock models of one vocabulary."""

    target: Model
    auxiliary: Model


def mock_pair(seed: int, vocab: int, peak: float, noise: float) -> Pair:
    """Random logits per prefix, `peak` their scale; the auxiliary's are the target's plus `noise` times as much."""

    @cache
    def logits(tokens: Tokens) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        generator = np.random.default_rng([seed, *tokens])
        target, other = generator.normal(scale=peak, size=(2, vocab))
        return target.astype(np.float32), (target + noise * other).astype(np.float32)

    return Pair(lambda tokens: logits(tokens)[0], lambda tokens: logits(tokens)[1])


def sure_pair(seed: int, vocab: int, gap: float) -> Pair:
    """An auxiliary whose logits put one token, which one depends on the prefix, `gap` above all others.

    The probability of the others is then less than 1 - q can express in float32, or in float64.
    """
    target, near = mock_pair(seed, vocab, peak=1.0, noise=1.0)

    @cache
    def sure(tokens: Tokens) -> NDArray[np.float32]:
        logits = near(tokens).copy()
        logits[(2 * len(tokens) + sum(tokens)) % vocab] = logits.max() + gap
        return logits

    return Pair(target, sure)


class Ties:
    """The closest call among the comparisons seen; exact equality is not one, rounding does not make it."""

    def __init__(self) -> None:
        self.closest = math.inf

    def note(self, left: float, right: float) -> None:
        if left != right and math.isfinite(left) and math.isfinite(right):
            self.closest = min(self.closest, abs(left - right))


@contextmanager
def watched() -> Iterator[Ties]:
    """How close the comparisons are that definitions make meanwhile."""
    ties = Ties()
    watchers.append(ties.note)
    try:
        yield ties
    finally:
        watchers.remove(ties.note)
