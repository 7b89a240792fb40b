"""What a method gains at equal quality: its speed divided by that of `block` at the temperature of the same quality.

A lower temperature makes text likelier and less diverse, and drafts easier to guess, without any loss: every point of
the curve of `block` over temperatures is the target's own distribution at one of them. So a lossy method has gained
only what it has beyond that curve.

* Where nothing is right or wrong, a method is compared with `block` at the temperature of equal perplexity, and at that
  of equal distinct-2; the smaller gain counts. Between two temperatures of the curve, the logarithm of the perplexity,
  distinct-2 and the speed are taken to be linear.
* Where answers are right or wrong, it is compared with the fastest temperature at which `block` is as accurate. Low
  temperatures are taken to be at least as accurate as higher ones.
* A method that the curve does not reach has no match. What is within two standard errors of an end of it counts as the
  end.
* Of a lossless method the quality is known: that of `block` at the method's own temperature. It is not measured.

Errors are from a bootstrap over prompts, all settings and seeds of a prompt together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mtad.params import DecodingParams
from scripts.evaluation.figures import Scored, sums
from scripts.evaluation.settings import undrafted

Floats = npt.NDArray[np.float64]

TEMPERATURES = (0.2, 0.35, 0.5, 0.65, 0.8, 1.0)
CURVES = ("block", "speculative")
"""Lossless settings whose curve over the temperatures is drawn; the first one's is compared with."""
SPEEDS = ("block_efficiency", "tokens_per_second")
MARGINS = {"accuracy": ("greedy", 0.02), "perplexity": ("sample", 0.03)}
"""What a method must not be worse than, and by how much at most: points of accuracy, a share of the perplexity."""
REPLICATES = 1000
GRID = np.linspace(TEMPERATURES[0], TEMPERATURES[-1], 81)
BLEND = np.stack([np.interp(GRID, TEMPERATURES, point) for point in np.eye(len(TEMPERATURES))], 1)
"""Between the points of a curve it is linear: [steps, points]."""


def curve_settings() -> list[str]:
    """Entries of `--methods` that the curves are made of."""
    return [f"{base}:temperature={temperature}" for base in CURVES for temperature in TEMPERATURES]


def on_curve(label: str) -> bool:
    """Whether a setting's label is that of a point of the curves."""
    return label in {f"{base} temperature={temperature:g}" for base in CURVES for temperature in TEMPERATURES}


def known(params: Mapping[str, DecodingParams]) -> dict[str, float]:
    """Of settings whose texts are distributed as those of `block` at some temperature of the curve: which one it is."""

    def filters(own: DecodingParams) -> DecodingParams:
        return replace(undrafted(own), temperature=1.0, branching=(1,), replacement=False)

    curve, low = filters(params[_label(TEMPERATURES[0])]), TEMPERATURES[0]
    same = {label: own for label, own in params.items() if own.spec.lossless and filters(own) == curve}
    return {label: own.temperature for label, own in same.items() if low <= own.temperature <= TEMPERATURES[-1]}


def gains(
    answers: Mapping[str, Sequence[Scored]], group: int = 1, lossless: Mapping[str, float] | None = None, seed: int = 0
) -> dict[str, Any]:
    """Gains of every setting that is not part of the curves.

    Args:
        answers: by label, those of the curves among them.
        group: prompts decoded at once, which the bootstrap keeps together.
        lossless: temperatures by label, of settings with the distribution that `block` has at this temperature.
        seed: of the bootstrap.

    Returns:
        by label: `at`, by the quality that is held equal, None for no match, or else `temperature` of the curve and,
        by speed, `value` and `error`; `gain`, by speed, the smaller one of these or None; and `not_inferior`, by
        figure, `yes`, `no` or `open`, within `MARGINS` at a level of 5 %.
    """
    tables = {label: sums(own, group) for label, own in answers.items()}
    tables = {label: own for label, own in tables.items() if own["block_efficiency"]}
    any_sums = tables[_label(TEMPERATURES[0])]["block_efficiency"]
    assert any_sums is not None, "settings without it have been left out"
    units = len(any_sums.top)
    drawn = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), REPLICATES)
    weights = np.concatenate([np.ones((1, units)), drawn])

    def figure(name: str, label: str) -> Floats:
        """Over all prompts, and over those of each replicate: [1 + replicates]."""
        own = tables[label][name]
        assert own is not None, "every answer has it"
        ratio: Floats = (weights @ own.top.sum(1)) / (weights @ own.bottom.sum(1))
        if name == "perplexity":
            ratio = np.exp(ratio)
        return ratio

    def curve(name: str) -> Floats:
        """That of the curve's points: [points, 1 + replicates]."""
        return np.stack([figure(name, _label(temperature)) for temperature in TEMPERATURES])

    scored = tables[_label(TEMPERATURES[0])]["accuracy"] is not None
    speeds = {speed: BLEND @ curve(speed) for speed in SPEEDS}
    found: dict[str, Any] = {}
    for label in tables:
        if on_curve(label):
            continue
        at: dict[str, Any] = {}
        for quality in ("accuracy",) if scored else ("perplexity", "distinct_2"):
            qualities = figure(quality, label), curve(quality)
            if quality == "perplexity":
                qualities = np.log(qualities[0]), np.log(qualities[1])
            own = (lossless or {}).get(label)
            if own is None:
                fits = matching(*qualities, at_least=scored)
            else:
                fits = (own + 1e-9 >= GRID if scored else np.abs(GRID - own) == np.abs(GRID - own).min())[:, None]
            at[quality] = None
            if fits is not None:
                best = np.where(fits, speeds[SPEEDS[0]], 0.0).argmax(0)
                at[quality] = {"temperature": _value(GRID[best])} | {
                    speed: _value(figure(speed, label) / np.where(fits, speeds[speed], 0.0).max(0)) for speed in SPEEDS
                }
        gain = {
            speed: None if None in at.values() else min((one[speed] for one in at.values()), key=lambda f: f["value"])
            for speed in SPEEDS
        }
        name = "accuracy" if scored else "perplexity"
        base, margin = MARGINS[name]
        not_inferior = {}
        if base in tables and base != label:
            mine, theirs = figure(name, label), figure(name, base)
            not_inferior[name] = _verdict(mine - theirs if scored else 1 - mine / theirs, margin)
        found[label] = {"at": at, "gain": gain, "not_inferior": not_inferior}
    return found


def matching(own: Floats, curve: Floats, at_least: bool) -> npt.NDArray[np.bool_] | None:
    """Which temperatures of `GRID` have a quality, or one at least as high: bool [steps, replicates]; None if none has.

    Args:
        own: the quality, [replicates], the first one over all prompts.
        curve: that of the curve's points, [points, replicates]. It rises with the temperature, or, where a quality of
            at least that is looked for, falls; what does not is levelled.
        at_least: look for a quality at least as high.
    """
    rising = np.maximum.accumulate(curve[::-1] if at_least else curve)
    points = BLEND @ (rising[::-1] if at_least else rising)
    above, below = own - points.max(0), points.min(0) - own
    if _beyond(above) or (not at_least and _beyond(below)):
        return None
    fits: npt.NDArray[np.bool_] = (
        points >= np.minimum(own, points.max(0))
        if at_least
        else np.arange(len(GRID))[:, None] == np.abs(points - own).argmin(0)
    )
    return fits


def _beyond(gap: Floats) -> bool:
    """Whether a gap is clearly above 0."""
    return bool(gap[0] > 2 * gap[1:].std())


def _verdict(lead: Floats, margin: float) -> str:
    error = 1.645 * lead[1:].std()
    return "yes" if lead[0] - error > -margin else "no" if lead[0] + error < -margin else "open"


def _value(replicates: Floats) -> dict[str, float]:
    return {"value": float(replicates[0]), "error": float(replicates[1:].std())}


def _label(temperature: float) -> str:
    return f"{CURVES[0]} temperature={temperature:g}"
