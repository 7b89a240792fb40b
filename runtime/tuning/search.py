"""Choosing draft length, beam width and acceptance threshold for a pair, on prompts like those it will get.

Every setting is measured against `sample` and `speculative` in the same run, all of them in turns on each prompt, one
request at a time. Its figures are paired ratios to these two, so that what was measured in one sweep can be compared
with what was measured in another. Two goals:

* `speed`: the most tokens/s, among settings whose perplexity is at most `max_perplexity` times `sample`'s, whose
  accuracy (where right answers are known) is at most `accuracy_loss` below `sample`'s, and whose distinct-2 is at least
  `min_distinct` times `sample`'s.
* `quality`: the highest accuracy where right answers are known, else the lowest perplexity, among settings at least
  `min_speed` times as fast as `speculative` and within `min_distinct`. Low perplexity may be repetition: look at
  distinct-2, or bound it.

The search goes by the figures themselves. What it chooses is then compared with the pair's present default on texts
that the search has not seen, and replaces it only if it leads by more than twice the standard error (`Decision`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mtad.errors import InvalidInput
from mtad.methods import METHODS, Method
from runtime import LLM, DecodingParams
from runtime.config import check_least
from runtime.tuning.measure import Measurement, Point, Progress, Right, Values, compare, measure

GRID: dict[str, tuple[Any, ...]] = {
    "draft_len": (2, 3, 4, 6, 8),
    "beam_width": (1, 2, 4, 8),
    "accept_threshold": (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9),
    "draft_confidence": (0.0, 0.03, 0.1, 0.3),
}
"""Values tried, by parameter, in the order in which a coordinate search takes them up; see `grid_of`."""

THRESHOLDS: dict[str, tuple[float, ...]] = {
    "joint.modal": (0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 5.0),
    "joint.typical": (0.01, 0.03, 0.09, 0.2, 0.3),
    "chain.bild": (0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
}
"""Thresholds tried of rules that bound something else than a ratio."""

TEMPERATURES = (0.3, 0.5, 0.7, 1.0)
"""Values tried where something bounds what a low temperature costs: right answers, or `min_distinct`."""

ROUNDS = 3
"""Of a coordinate search at most."""


def grid_of(method: Method) -> dict[str, tuple[Any, ...]]:
    """Values tried for a method."""
    own = {"accept_threshold": THRESHOLDS.get(method.rule, GRID["accept_threshold"])}
    return {name: own.get(name, values) for name, values in GRID.items() if method.uses(name)}


@dataclass(frozen=True)
class Objective:
    """What is looked for; see the module's description. Bounds are relative to `sample`, `min_speed` to `speculative`.

    Raises:
        InvalidInput: a value is not usable.
    """

    goal: Literal["speed", "quality"] = "speed"
    max_perplexity: float = 1.0
    accuracy_loss: float = 0.0
    min_speed: float = 1.0
    min_distinct: float = 0.0

    def __post_init__(self) -> None:
        if self.goal not in ("speed", "quality"):
            raise InvalidInput("goal", self.goal, "give speed or quality")
        check_least(self, max_perplexity=1e-9, accuracy_loss=0, min_speed=0, min_distinct=0)

    def excess(self, point: Point) -> float:
        """How far a point is beyond the bounds, as a share of them; 0 within."""
        beyond = [self.min_distinct - point.distinct_ratio]
        if self.goal == "speed":
            beyond.append(point.perplexity_ratio / self.max_perplexity - 1)
            if point.accuracy_gain is not None:
                beyond.append(-self.accuracy_loss - point.accuracy_gain)
        else:
            beyond.append(self.min_speed - point.speed_vs_speculative)
        return max(0.0, *beyond)

    def better(self, point: Point) -> tuple[float, ...]:
        """Larger is better: within the bounds first, then nearer to them, then the goal."""
        excess = self.excess(point)
        if self.goal == "speed":
            return (-excess, point.speed)
        return (-excess, point.accuracy_gain or 0.0, -point.perplexity_ratio)


@dataclass(frozen=True)
class Tuning:
    """What a search found.

    Attributes:
        points: all that were measured, in the order they were.
        fits: whether the choice keeps the bounds; if not, no point did, and it is the nearest.
    """

    choice: Point
    points: list[Point]
    fits: bool


def tune(
    llm: LLM,
    prompts: Sequence[str],
    base: DecodingParams,
    objective: Objective,
    grid: Mapping[str, Sequence[Any]] | None = None,
    search: Literal["coordinate", "grid"] = "coordinate",
    seeds: int = 1,
    right: Right = None,
    progress: Progress = lambda done, total: None,
) -> Tuning:
    """Search for the best setting of `base.method`, which has something to tune.

    Args:
        llm: an idle pair, large enough for the grid's drafts.
        prompts: at least two.
        base: the method, everything that is not tuned, and where a coordinate search begins.
        grid: values by parameter, `temperature` among them; those the method does not use are not varied. Default:
            `grid_of`.
        search: `coordinate` varies one parameter at a time, the others at their best so far, until nothing gets better
            (at most 3 rounds); `grid` measures every combination.
        right: whether a text answers the prompt of that number, where that is known.
        progress: called with the answers given in this sweep, and how many it has.

    Raises:
        InvalidInput: a prompt or value does not fit the engines; nothing was run.
    """
    grid = grid_of(base.spec) if grid is None else grid
    names = [name for name in grid if name in (*GRID, "temperature") and base.spec.uses(name)]
    every = [tuple(zip(names, values, strict=True)) for values in itertools.product(*(grid[name] for name in names))]
    largest = {name: max(grid[name]) for name in names if name in ("draft_len", "beam_width")}
    for prompt in prompts:
        llm.requests(prompt, replace(base, **largest))  # refuses what does not fit
    measured: dict[Values, Point] = {}

    def sweep(settings: Sequence[Values]) -> None:
        fresh = [values for values in settings if values not in measured]
        if fresh:
            measured.update(measure(llm, prompts, base, fresh, Measurement(range(seeds), right, progress)))

    def best(settings: Sequence[Values]) -> Values:
        return max(settings, key=lambda values: objective.better(measured[values]))

    if search == "grid":
        sweep(every)
    else:
        now = {name: _now(base, name) for name in names}
        here: Values = tuple((name, min(grid[name], key=lambda value: abs(value - now[name]))) for name in names)
        for _ in range(ROUNDS):
            before = here
            for name in names:
                line = [tuple((n, v if n == name else own) for n, own in here) for v in grid[name]]
                sweep(line)
                here = best([*line, here] if here in measured else line)
            if here == before:
                break
    choice = measured[best(list(measured))]
    return Tuning(choice, list(measured.values()), objective.excess(choice) == 0)


def join(found: Mapping[str, Tuning], objective: Objective) -> Tuning:
    """The searches of several methods as one, whose values say which method they are for.

    For speed, a lossy method must be faster than the best lossless one by more than twice the standard error: what
    keeps the target's distribution needs no proof that its texts are as good.
    """
    named = {
        method: [replace(point, values={"method": method, **point.values}) for point in one.points]
        for method, one in found.items()
    }
    best = {
        method: next(p for p, own in zip(points, found[method].points, strict=True) if own is found[method].choice)
        for method, points in named.items()
    }
    choice = max(best.values(), key=objective.better)
    lossless = [point for method, point in best.items() if METHODS[method].lossless and not objective.excess(point)]
    if objective.goal == "speed" and lossless:
        safe = max(lossless, key=objective.better)
        if choice.speed - safe.speed <= 2 * math.hypot(choice.speed_error, safe.speed_error):
            choice = safe
    return Tuning(choice, [point for points in named.values() for point in points], objective.excess(choice) == 0)


@dataclass(frozen=True)
class Decision:
    """Whether a choice should replace the pair's present default."""

    change: bool
    reason: str


def judge(
    llm: LLM,
    prompts: Sequence[str],
    now: DecodingParams,
    choice: DecodingParams,
    objective: Objective,
    seeds: int = 1,
    right: Right = None,
    progress: Progress = lambda done, total: None,
) -> Decision:
    """Compare what a search chose with the present default, on texts that the search has not seen."""
    if now == choice:
        return Decision(False, "it is the best setting that was found")
    before, lead = compare(llm, prompts, now, choice, Measurement(range(seeds, 2 * seeds), right, progress))
    if objective.excess(before) > 0:
        figures = f"perplexity {before.perplexity_ratio:.2f} of sample's, distinct-2 {before.distinct_ratio:.2f}"
        speed = f"{before.speed_vs_speculative:.2f} times speculative's speed"
        return Decision(True, f"the earlier default is out of bounds ({figures}, {speed})")
    if objective.goal == "speed":
        by, error, what = lead.speed - 1, lead.speed_error, "tokens per second"
    elif lead.accuracy_gain is not None and lead.accuracy_gain_error is not None:
        by, error, what = lead.accuracy_gain, lead.accuracy_gain_error, "accuracy"
    else:
        by, error, what = 1 - lead.perplexity_ratio, lead.perplexity_ratio_error, "lower perplexity"
    figures = f"{by:+.1%} ±{error:.1%} {what}"
    if by > 2 * error:
        return Decision(True, figures)
    return Decision(False, f"the best setting found gives {figures}, which is not clearly better; try more prompts")


def _now(params: DecodingParams, name: str) -> Any:
    own = {"accept_threshold": params.threshold, "draft_confidence": params.confidence}
    return own.get(name, getattr(params, name))


def describe(tuning: Tuning, objective: Objective) -> dict[str, Any]:
    """Plain values, for `pair.json`."""
    return {
        "objective": asdict(objective),
        "choice": asdict(tuning.choice),
        "curve": [asdict(point) for point in tuning.points],
    }
