"""Choosing the fastest decoding parameters of a pair among those that keep the quality of its texts.

Every setting is measured against `sample` in the same run, and its figures are paired ratios to `sample`'s, so that
what was measured in one run can be compared with what was measured in another. `Point.quality_loss` says how quality is
measured.

A search goes by the figures themselves, so what it finds may owe something to luck. `decide` therefore compares each
method's best setting with the pair's present default, on prompts that no search has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engines.prompts import Example
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.llm import LLM
from runtime.tuning.measure import FIGURES, Point, measure, speedup, with_error

GRID: dict[str, tuple[Any, ...]] = {
    "draft_len": ("auto", 2, 3, 4, 6, 8),
    "beam_width": (1, 2, 4),
    "accept_threshold": (0.02, 0.06, 0.2, 0.6, 1.0, 1.4),
    "draft_confidence": (0.0, 0.03, 0.1, 0.3),
}
"""Values tried, by parameter, in the order in which a search varies them; thresholds are multiples of the default."""


def grid_of(method: str) -> dict[str, tuple[Any, ...]]:
    """Values tried for a method: of the parameters that it uses."""
    spec = METHODS[method]
    own = {"accept_threshold": tuple(round(times * (spec.threshold or 0.0), 4) for times in GRID["accept_threshold"])}
    return {name: own.get(name, values) for name, values in GRID.items() if spec.uses(name)}


def setting_of(params: DecodingParams) -> dict[str, Any]:
    """The method, and what is tuned of its parameters, by name."""
    own = replace(params, accept_threshold=params.threshold)
    return {"method": params.method, **{name: getattr(own, name) for name in grid_of(params.method)}}


def order(point: Point, quality_loss: float) -> tuple[float, float]:
    """Larger is better: what loses at most `quality_loss` first, then what is nearer to that, then what is faster."""
    return -max(0.0, point.quality_loss - quality_loss), point.figures["x sample"][0]


def search(llm: LLM, examples: Sequence[Example], base: DecodingParams, quality_loss: float) -> list[Point]:
    """Vary one parameter at a time, with the others at their best values so far, until nothing improves.

    Args:
        llm: an idle pair, large enough for the grid's drafts.
        examples: at least two.
        base: the method, and everything that is not tuned.
        quality_loss: how much quality a setting may lose.

    Returns:
        all settings that were measured, the best one first.
    """
    here, before = setting_of(DecodingParams(method=base.method)), None
    points: dict[tuple[Any, ...], Point] = {}
    while here != before:
        before = here
        for name, values in grid_of(base.method).items():
            line = [{**here, name: value} for value in values]
            fresh = [own for own in line if tuple(own.values()) not in points]
            if fresh:
                for point in measure(llm, examples, base, fresh, 0, f"tuning {base.method}, {name}"):
                    points[tuple(point.values.values())] = point
            here = max(line, key=lambda own: order(points[tuple(own.values())], quality_loss))
    return sorted(points.values(), key=lambda point: order(point, quality_loss), reverse=True)


def decide(
    llm: LLM, examples: Sequence[Example], base: DecodingParams, settings: Sequence[dict[str, Any]], quality_loss: float
) -> tuple[list[Point], Point, str]:
    """Choose between the present default and settings that were found, on prompts that no search has seen.

    A setting that keeps the quality replaces another one if it leads by more than twice the standard error, or if the
    other one does not keep the quality. Lossless methods are compared first: what keeps the target's distribution needs
    no proof that its texts are as good.

    Args:
        base: everything that is not tuned.
        settings: the present default first.

    Returns:
        the points of the settings, the present default's first; the chosen one; and why it was chosen.
    """
    now, *found = settings
    lossless_first = sorted(found, key=lambda own: not METHODS[own["method"]].lossless)
    points = measure(llm, examples, base, [now, *(own for own in lossless_first if own != now)], 1, "comparing")
    choice = default = points[0]
    for point in points[1:]:
        speed, error = with_error(speedup, point.texts, choice.texts)
        clear = speed - 1 > 2 * error or choice.quality_loss > quality_loss
        if clear and point.quality_loss <= quality_loss:
            choice = point
    if choice is default:
        reason = "no other setting is clearly faster and keeps the quality; more prompts make smaller leads visible"
    else:
        speed, error = with_error(speedup, choice.texts, default.texts)
        reason = f"it has {speed:.2f} ±{error:.2f} times the earlier default's tokens per second"
        if default.quality_loss > quality_loss:
            reason += ", and is shown to keep the quality, as that is not"
    return points, choice, reason


def table(points: Sequence[Point]) -> str:
    """Settings and their figures, one line each."""
    names = [name for name in ("method", *GRID) if any(name in point.values for point in points)]
    known = [name for name in FIGURES if any(name in point.figures for point in points)]
    lines = [[*names, *known]]
    for point in points:
        values = (str(point.values.get(name, "-")) for name in names)
        lines.append([*values, *(_with_error(*point.figures[n]) if n in point.figures else "-" for n in known)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _with_error(value: float, error: float) -> str:
    return f"{value:.0f} ±{error:.0f}" if value >= 100 else f"{value:.3f} ±{error:.3f}"
