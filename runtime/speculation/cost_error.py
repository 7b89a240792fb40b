"""What the table of step costs gets wrong, learnt from the blocks that are run. No torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

SPEED, PART, OWN = 0.7, 0.3, 0.1
"""Standard deviations, before anything is seen, of what `CostError` adds up."""

NOISE, DRIFT = 0.15, 0.02
"""Standard deviations of one block's seconds, and of how much the machine's speed changes from a block to the next."""


class CostError:
    """The logarithm of a block's seconds over those of the table, by a Kalman filter.

    It is the sum of the machine's speed, which drifts; of errors that some parts of all blocks have, each times its
    share of the block; and of an error of each kind of block's own. What was never run has no error of its own yet. A
    comparison of two kinds that were run does not depend on the speed.

    Args:
        parts: number of such parts.
    """

    def __init__(self, parts: int) -> None:
        self._mean = np.zeros(1 + parts)
        self._covariance = np.diag([SPEED**2] + [PART**2] * parts)
        self._places: dict[Hashable, int] = {}

    @property
    def speed(self) -> float:
        """By which factor the machine is slower than the table says."""
        return math.exp(self._mean[0])

    def of(self, kind: Hashable, shares: Sequence[float]) -> float:
        """What is expected of a kind of block, given its parts' shares."""
        own = self._mean[self._places[kind]] if kind in self._places else 0.0
        return float(self._mean[0] + sum(map(float.__mul__, self._mean[1:].tolist(), shares)) + own)

    def observe(self, kind: Hashable, shares: Sequence[float], error: float) -> None:
        """Learn from one block. What is beyond three standard deviations counts as three: something else happened."""
        if (place := self._places.setdefault(kind, len(self._mean))) == len(self._mean):
            self._mean = np.append(self._mean, 0.0)
            self._covariance = np.pad(self._covariance, (0, 1))
            self._covariance[place, place] = OWN**2
        self._covariance[0, 0] += DRIFT**2
        seen = np.zeros(len(self._mean))
        seen[0], seen[1 : 1 + len(shares)], seen[place] = 1.0, shares, 1.0
        gain = self._covariance @ seen
        variance = gain @ seen + NOISE**2
        limit = 3 * math.sqrt(variance)
        self._mean += gain * (np.clip(error - self._mean @ seen, -limit, limit) / variance)
        self._covariance -= np.outer(gain, gain) / variance
