"""Medians of measurements that took turns, with their 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """The median, and its 95 % interval by order statistics: all values, where there are fewer than six."""
    ordered, n = sorted(values), len(values)
    left_out = 0
    while left_out + 1 < n / 2 and 2 * sum(math.comb(n, k) for k in range(left_out + 2)) / 2**n <= 0.05:
        left_out += 1
    return {"median": statistics.median(values), "low": ordered[left_out], "high": ordered[-1 - left_out]}


def paired_ratio(own: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """The `median_interval` of ratios that are taken round by round."""
    return median_interval([a / b for a, b in zip(own, base, strict=True)])


def shown(figure: Mapping[str, float], digits: int = 2) -> str:
    """A `median_interval` as tables have it."""
    median, low, high = (f"{figure[name]:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"
