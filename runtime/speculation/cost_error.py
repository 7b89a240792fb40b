"""What the table of step costs gets wrong, learnt from the blocks that are run. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence

import numpy as np

SPEED, PART, OWN = 0.7, 0.3, 0.1
"""Standard deviations, before anything is seen, of what `CostError` adds up."""

NOISE, DRIFT = 0.15, 0.03
"""Standard deviations of one block's seconds, and of how much the machine's speed changes between observations."""

KEPT = 0.999
"""Share of everything else that an observation leaves: contexts grow, and what was learnt long ago is no longer so."""

MOST = 64
"""Kinds of blocks with an error of their own. One more takes the place of the one that was not run for longest."""


class CostError:
    """The logarithm of a block's seconds over those of the table, by a Kalman filter.

    It is speed + sum(share * part) + own. The machine's speed drifts; each part of a block has an error, which counts
    by the part's share of the seconds (to first order, for small errors); and so has each kind of block. What was never
    run has no error of its own yet. A comparison of two kinds that were run does not depend on the speed.

    Args:
        parts: how many parts there are, as `of` and `observe` get their shares.
    """

    def __init__(self, parts: int) -> None:
        self._prior = np.array([SPEED**2] + [PART**2] * parts)
        self._mean, self._covariance = np.zeros(1 + parts), np.diag(self._prior)
        self._places: dict[Hashable, int] = {}  # that of the kind that was run last comes last

    @property
    def speed(self) -> float:
        """By which factor the machine is slower than the table says."""
        return math.exp(self._mean[0])

    def of(self, kind: Hashable, shares: Sequence[float]) -> float:
        """What is expected of a kind of block, given its parts' shares."""
        own = self._mean[self._places[kind]] if kind in self._places else 0.0
        return float(self._mean[0] + sum(map(float.__mul__, self._mean[1:].tolist(), shares)) + own)

    def observe(self, kind: Hashable, shares: Sequence[float], errors: Sequence[float]) -> None:
        """Learn from the median of some blocks of one kind.

        What is beyond three standard deviations of one block counts as three: something else happened.
        """
        place = self._places.pop(kind, None)
        if place is None:
            place = self._new_place()
        self._places[kind] = place
        self._mean[1:] *= KEPT
        self._covariance[1:] *= KEPT
        self._covariance[:, 1:] *= KEPT
        self._covariance[np.diag_indices_from(self._covariance)] += (1 - KEPT**2) * np.append(0, self._prior[1:])
        self._covariance[0, 0] += DRIFT**2
        seen = np.zeros(len(self._mean))
        seen[0], seen[1 : 1 + len(shares)], seen[place] = 1.0, shares, 1.0
        gain = self._covariance @ seen
        limit = 3 * math.sqrt(gain @ seen + NOISE**2)
        variance = gain @ seen + NOISE**2 / len(errors)
        self._mean += gain * (np.clip(statistics.median(errors) - self._mean @ seen, -limit, limit) / variance)
        self._covariance -= np.outer(gain, gain) / variance

    def _new_place(self) -> int:
        """Where the error of a kind that has none goes."""
        if len(self._places) < MOST:
            self._prior, self._mean = np.append(self._prior, OWN**2), np.append(self._mean, 0.0)
            self._covariance = np.pad(self._covariance, (0, 1))
            place = len(self._mean) - 1
        else:
            place = self._places.pop(next(iter(self._places)))
            self._mean[place] = self._covariance[place] = self._covariance[:, place] = 0.0
        self._covariance[place, place] = OWN**2
        return place
