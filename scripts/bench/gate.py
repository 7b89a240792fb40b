"""The gate of adaptive drafts: not slower than sampling, and within 5 % of the best fixed setting, at every load."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """The median, and its 95 % confidence interval by order statistics (which assumes no distribution).

    The interval spans all values where there are fewer than six.
    """
    ordered, n = sorted(values), len(values)
    left_out = 0
    while left_out + 1 < n / 2 and 2 * sum(math.comb(n, k) for k in range(left_out + 2)) / 2**n <= 0.05:
        left_out += 1
    return {"median": statistics.median(values), "low": ordered[left_out], "high": ordered[-1 - left_out]}


def compare_adaptive(rates: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Each adaptive system's tokens per second against `sample` and against its best fixed setting, round by round.

    Args:
        rates: by system, the n-th ones of one round; the fixed form of `NAME adaptive` is `NAME`.

    Returns:
        by adaptive system: `sample` and `fixed`, each a `median_interval` of ratios, and `best`, which setting that is.
    """
    found = {}
    for name, own in rates.items():
        method = name.removesuffix(" adaptive")
        if method != name:
            best = max(("sample", method), key=lambda base: statistics.median(rates[base]))
            ratios = {
                base: [a / b for a, b in zip(own, rates[base], strict=True)] for base in dict.fromkeys(("sample", best))
            }
            found[name] = {
                "sample": median_interval(ratios["sample"]),
                "fixed": median_interval(ratios[best]),
                "best": best,
            }
    return found


def gate_table(report: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """Lines of a table of `compare_adaptive` by load: ratios with their intervals."""

    def shown(cell: Mapping[str, float]) -> str:
        return f"{cell['median']:.3f} ({cell['low']:.3f} .. {cell['high']:.3f})"

    lines = [["adaptive: paired medians (95 %)", "load", "against sample", "against the best fixed", "which is"]]
    for load, cells in report.items():
        for name, cell in cells.items():
            lines.append([name, str(load), shown(cell["sample"]), shown(cell["fixed"]), cell["best"]])
    return lines
