"""How long a model is trained, and how its rate moves meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from scripts.demo.recipes import Recipe


@dataclass(frozen=True)
class Limit:
    """How long a model is trained, over all calls, and how long this call may take.

    Attributes:
        steps: in all; None: `seconds` count.
        seconds: of training in all, checkpoints included.
        until: when this call stops wherever it is, on `clock`.
        clock: seconds.
    """

    steps: int | None = None
    seconds: float = math.inf
    until: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def share(self, step: int, seconds: float) -> float:
        """Of the training that is over."""
        return step / self.steps if self.steps else min(seconds / self.seconds, 1.0)


def rate_scale(step: int, share: float, recipe: Recipe, steps: int | None) -> float:
    """Share of the peak rate at a step, of the training of which `share` is over; see `Recipe`."""
    rising = (step + 1) / recipe.warmup
    if steps:
        return min(rising, 1.0, (steps - step) / (recipe.decay * steps))
    return min(rising, 0.5 + 0.5 * math.cos(math.pi * share))
