"""A comparison with its bound."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what was compared.
        found: the figure; NaN fails.
        allowed: the largest that passes; infinite where the figure is for the reader alone.
        unit: of both.
    """

    name: str
    found: float
    allowed: float
    unit: str

    @property
    def passed(self) -> bool:
        """Whether it is within its bound."""
        return self.found <= self.allowed

    def __str__(self) -> str:
        bound = "" if math.isinf(self.allowed) else f" (at most {self.allowed:g})"
        return f"{'ok' if self.passed else 'FAILED':<7}{self.name:<34}{self.found:>10.4g} {self.unit}{bound}"
