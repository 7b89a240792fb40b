"""What a method gains, at what quality: its speed divided by that of `block` at the temperature that matches it.

A lower temperature makes text likelier, less diverse and easier to draft without any loss: each point of the curve of
`block` is the target's own law at one temperature. So a method has gained only what it has beyond that curve.

* Open-ended text: the method is compared at the temperatures of equal perplexity, of equal distinct-2 and of equal
  self-BLEU; the smallest gain is its gain. It *holds* if one temperature of `block` is neither likelier nor more
  diverse, within a text and between the answers to a prompt: the temperature of equal perplexity must not be above that
  of equal distinct-2 or of equal self-BLEU, by two standard errors.
* Verified answers: it is compared with the fastest temperature at which `block` has at least its pass@1. It holds if it
  is shown, at a level of 5 %, to be not more than a point below lossless decoding of its own kind (`greedy` at
  temperature 0, else `block`) in pass@1 and in pass@8.
* Of a lossless method the law is known: it is compared with `block` at its own temperature, and holds.
* What the curve does not reach has no match. Within two standard errors of an end of the curve counts as the end.

This is not equal quality: the auxiliary alone, which is worse than the target, must not hold at any temperature. That
is the control. Where it holds, the comparison proves nothing, and no gain of the run counts.
Errors are from a bootstrap over prompts, all settings and all answers to a prompt together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scripts.evaluation.figures import Figure, Floats
from scripts.evaluation.settings import BLOCK, GREEDY, TEMPERATURES, Setting, curve_label

Figures = Mapping[str, Figure]

DRAFTED = ("method", "draft", "draft_len", "beam_width", "branching", "draft_confidence")
"""Parameters that a lossless method's law does not depend on."""
SPEEDS = ("tokens_per_pass", "tokens_per_second")
QUALITIES: dict[str, Callable[[Floats], Floats]] = {
    "perplexity": np.log,
    "distinct_2": np.asarray,
    "self_bleu": np.negative,
}
"""Of open-ended text, those that are held equal, on scales that rise with the temperature."""
MARGIN = 0.01
"""How much lower pass@k may be."""
LEVEL, ONE_SIDED = 0.05, 1.645
REPLICATES = 1000
STEPS = 81


class Grid(NamedTuple):
    """Temperatures of the curve, which is linear between its points: `at` [steps], `blend` [steps, points]."""

    at: Floats
    blend: Floats

    @classmethod
    def between(cls, points: Sequence[float]) -> Grid:
        """From the first of the curve's points to the last."""
        at = np.linspace(points[0], points[-1], STEPS)
        return cls(at, np.stack([np.interp(at, points, point) for point in np.eye(len(points))], 1))


def gains(settings: Sequence[Setting], tables: Mapping[str, Figures], seed: int = 0) -> dict[str, Any]:
    """Gains of every setting that is not part of the curve.

    Args:
        settings: all that were measured.
        tables: their figures by label.
        seed: of the bootstrap.

    Returns:
        by label: `at`, by the quality that is held equal, the `temperature` of the curve and by speed the gain, or None
        for no match; `gain`, by speed, the smallest one or None; `pass`, by k, `yes`, `no` or `open`; `holds`; whether
        it is the `control`. Values have `value` and `error`.
    """
    points = {curve_label(t): t for t in TEMPERATURES if curve_label(t) in tables}
    curve, grid = [tables[label] for label in points], Grid.between(list(points.values()))
    (block,) = (setting for setting in settings if setting.label == BLOCK)
    prompts = len(curve[0]["perplexity"].top)
    draws = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), REPLICATES)
    weights = np.concatenate([np.ones((1, prompts)), draws])  # the first is over all prompts as they are
    verified = "pass@1" in curve[0]
    speeds = {name: grid.blend @ np.stack([point[name].over(weights) for point in curve]) for name in SPEEDS}
    found: dict[str, Any] = {}
    for setting in settings:
        if setting.label in points:
            continue
        own = tables[setting.label]
        at: dict[str, Any] = {}
        for quality in ("pass@1",) if verified else QUALITIES:
            fits = _fits(grid, _known(grid, setting, block), quality, own, curve, weights)
            at[quality] = None if fits is None else _gain_where(grid, fits, own, speeds, weights)
        gain = {name: _smaller([one and one[name] for one in at.values()]) for name in SPEEDS}
        row: dict[str, Any] = {"at": at, "gain": gain, "control": setting.alone}
        if verified:
            base = tables[GREEDY if setting.deterministic else BLOCK]
            row["pass"] = {k: _not_inferior(own[k], base[k], weights) for k in own if k.startswith("pass@")}
            row["holds"] = setting.lossless or set(row["pass"].values()) == {"yes"}
        else:
            row["holds"] = None not in at.values() and (setting.lossless or _one_temperature(at))
        for one in (one for one in at.values() if one):
            one["temperature"] = _value(one["temperature"])
        found[setting.label] = row
    return found


def control_failed(gained: Mapping[str, Any]) -> bool:
    """Whether the auxiliary alone holds at no temperature, as it must."""
    return not any(row["holds"] for row in gained.values() if row["control"])


def _fits(
    grid: Grid, known: float | None, quality: str, own: Figures, curve: Sequence[Figures], weights: Floats
) -> npt.NDArray[np.bool_] | None:
    """Which temperatures of the grid match in a quality, [steps, 1 or replicates]; None if none does.

    Args:
        known: the temperature of the curve whose law it is, if it is one.
    """
    if known is not None:
        near = np.abs(grid.at - known)
        exact: npt.NDArray[np.bool_] = (near == near.min())[:, None]
        return exact
    scale = QUALITIES.get(quality, np.asarray)
    values, points = own[quality].over(weights), np.stack([point[quality].over(weights) for point in curve])
    return matching(grid, scale(values), scale(points), at_least=quality == "pass@1")


def _known(grid: Grid, setting: Setting, block: Setting) -> float | None:
    """The temperature at which `block` has a setting's law, where the curve has it: only drafts may differ."""
    own = setting.params.temperature
    same = replace(block.params, temperature=own, **{name: getattr(setting.params, name) for name in DRAFTED})
    on_curve = grid.at[0] <= own <= grid.at[-1]
    return own if setting.lossless and on_curve and same == setting.params else None


def matching(grid: Grid, own: Floats, curve: Floats, at_least: bool) -> npt.NDArray[np.bool_] | None:
    """Which temperatures have a quality, or one at least as high: bool [steps, replicates]; None if none has.

    Args:
        own: the quality, [replicates], the first one over all prompts.
        curve: that of the curve's points, [points, replicates]. It rises with the temperature, or, where a quality of
            at least that is looked for, falls; what does not is levelled.
        at_least: look for a quality at least as high.
    """
    rising = np.maximum.accumulate(curve[::-1] if at_least else curve)
    points = grid.blend @ (rising[::-1] if at_least else rising)
    above, below = own - points.max(0), points.min(0) - own
    if _beyond(above) or (not at_least and _beyond(below)):
        return None
    fits: npt.NDArray[np.bool_] = (
        points >= np.minimum(own, points.max(0))
        if at_least
        else np.arange(len(grid.at))[:, None] == np.abs(points - own).argmin(0)
    )
    return fits


def _gain_where(
    grid: Grid, fits: npt.NDArray[np.bool_], own: Figures, speeds: Mapping[str, Floats], weights: Floats
) -> dict[str, Any]:
    """Gains over the fastest of the temperatures that match, and that temperature, [1 + replicates]."""
    found: dict[str, Any] = {"temperature": grid.at[np.where(fits, speeds[SPEEDS[0]], 0.0).argmax(0)]}
    for name, curve in speeds.items():
        ratio = own[name].over(weights) / np.where(fits, curve, 0.0).max(0) if name in own else None
        found[name] = None if ratio is None else _value(ratio)
    return found


def _smaller(gains: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [one for one in gains if one]
    return min(known, key=lambda one: one["value"]) if len(known) == len(gains) else None


def _one_temperature(at: Mapping[str, Any]) -> bool:
    """Whether the temperature of equal perplexity is not clearly above that of equal diversity, by either measure."""
    gaps = (at["perplexity"]["temperature"] - at[name]["temperature"] for name in ("distinct_2", "self_bleu"))
    return not any(map(_beyond, gaps))


def _not_inferior(own: Figure, base: Figure, weights: Floats) -> str:
    lead = own.over(weights) - base.over(weights)
    unseen = 1 - LEVEL ** (1 / len(own.top))  # where no prompt differs, so large a share of others might
    error = max(ONE_SIDED * lead[1:].std(), unseen)
    return "yes" if lead[0] - error > -MARGIN else "no" if lead[0] + error < -MARGIN else "open"


def _beyond(gap: Floats) -> bool:
    """Whether a gap is clearly above 0."""
    return bool(gap[0] > 2 * gap[1:].std())


def _value(replicates: Floats) -> dict[str, float]:
    return {"value": float(replicates[0]), "error": float(replicates[1:].std())}
