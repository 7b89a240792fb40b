"""The tables and the picture of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS: dict[str, tuple[str, float, str]] = {
    "tokens_per_pass": ("tokens per pass", 1, ".2f"),
    "thinking": ("in thoughts", 1, ".2f"),
    "answering": ("in answers", 1, ".2f"),
    "tokens_per_second": ("tokens/s", 1, ".0f"),
    "speedup": ("x block", 1, ".2f"),
    "perplexity": ("perplexity", 1, ".2f"),
    "distinct_2": ("distinct-2", 1, ".2f"),
    "self_bleu": ("self-BLEU", 100, ".0f"),
    "pass@1": ("pass@1 %", 100, ".1f"),
    "pass@8": ("pass@8 %", 100, ".1f"),
    "told_apart": ("told from block %", 100, ".0f"),
    "tokens": ("tokens", 1, ".0f"),
    "joules_per_token": ("J per token", 1, ".3f"),
}
"""Figures: heading, factor, format."""
FEWEST = 299
"""Verified answers of which none differs, by which a difference of a point is excluded at a level of 5 %."""


def tables(figures: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """`settings`: all figures; `gain`: gains over `block`, and whether they count. ± is one standard error."""
    return {"settings": _settings(figures["settings"]), "gain": _gain(figures["gain"], figures["control_failed"])}


def _settings(rows: Mapping[str, Any]) -> list[list[str]]:
    names = [name for name in COLUMNS if any(name in row["figures"] for row in rows.values())]
    lines = [["setting", "draft", *(COLUMNS[name][0] for name in names)]]
    for label, row in rows.items():
        cells = [cell(row["figures"].get(name), *COLUMNS[name][1:]) for name in names]
        lines.append([label, row["draft"], *cells])
    return lines


def cell(figure: Mapping[str, Any] | None, factor: float, form: str) -> str:
    """A figure with its error, `-` for none."""
    if not figure or figure["value"] is None:
        return "-"
    error = "" if figure["error"] is None else f" ± {figure['error'] * factor:{form}}"
    return f"{figure['value'] * factor:{form}}{error}"


def _gain(gained: Mapping[str, Any], failed: bool) -> list[list[str]]:
    first = next(iter(gained.values()))
    heads = [f"at equal {COLUMNS[name][0]}" for name in first["at"]]
    if "pass" in first:
        heads = ["at no less pass@1", *(f"{k} within a point" for k in first["pass"])]
    lines = [["setting", "gain, tokens per pass", "gain, tokens/s", *heads, "holds", "counts"]]

    def size(row: Mapping[str, Any]) -> tuple[bool, float]:
        own = row["gain"]["tokens_per_pass"]
        return row["control"], -own["value"] if own else 0.0

    for label, row in sorted(gained.items(), key=lambda entry: size(entry[1])):
        cells = [cell(own, 1, ".2f") for own in row["gain"].values()]
        for at in row["at"].values():
            speed = at and (at["tokens_per_pass"] or at["tokens_per_second"])
            cells.append(f"{cell(speed, 1, '.2f')} (T {at['temperature']['value']:.2f})" if at else "no match")
        own = row["gain"]["tokens_per_second"]  # a longer draft gives more tokens per pass by any rule
        larger = own is not None and own["value"] - 2 * own["error"] > 1
        counts = "control" if row["control"] else "yes" if failed and row["holds"] and larger else "no"
        lines.append([label, *cells, *row.get("pass", {}).values(), "yes" if row["holds"] else "no", counts])
    return lines


def verdict(figures: Mapping[str, Any]) -> str:
    """What the control says, in a sentence."""
    rows = figures["gain"].items()
    held = [label for label, row in rows if row["control"] and row["holds"]]
    few = any(row.get("pass") for _, row in rows) and figures["prompts"] < FEWEST
    if few:
        return f"Too few prompts to show anything of methods or control: {FEWEST} verified answers are the least."
    if figures["control_failed"]:
        return "The control failed, as it must: the auxiliary alone holds at no temperature. Gains count."
    return f"THE CONTROL DID NOT FAIL: {', '.join(held)} would hold. No gain of this run counts."


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Tokens per pass against each quality that is held equal: settings, and the curve of `block`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    from scripts.evaluation.settings import TEMPERATURES, curve_label

    rows, qualities = figures["settings"], list(next(iter(figures["gain"].values()))["at"])
    shape = {"figsize": (7.5 * len(qualities), 6), "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(1, len(qualities), **shape)

    def places(labels: Sequence[str], name: str) -> list[float]:
        factor = 1 if name == "tokens_per_pass" else COLUMNS[name][1]
        return [rows[label]["figures"][name]["value"] * factor for label in labels]

    shown = [label for label, row in figures["gain"].items() if not row["control"]]
    shown.sort(key=lambda label: rows[label]["figures"]["tokens_per_pass"]["value"])
    temperatures = [t for t in TEMPERATURES if curve_label(t) in rows]
    curve = [curve_label(temperature) for temperature in temperatures]
    for axis, quality in zip(axes[0], qualities, strict=True):
        text = f"block at temperatures {temperatures[0]:g} to {temperatures[-1]:g}"
        axis.plot(places(curve, quality), places(curve, "tokens_per_pass"), "k-o", markersize=3, lw=1, label=text)
        xs, ys = places(shown, quality), places(shown, "tokens_per_pass")
        axis.plot(xs, ys, "o", markersize=4)
        line = {"arrowstyle": "-", "lw": 0.4, "color": "gray", "relpos": (0, 0.5)}
        for height, label, x, y in zip(np.linspace(0, 1, len(shown)), shown, xs, ys, strict=True):
            axis.annotate(label, (x, y), (1.02, height), "data", "axes fraction", arrowprops=line, fontsize=7)
        axis.set(xlabel=COLUMNS[quality][0], ylabel="tokens per target pass")
        axis.set_title(f"{figures['set']}: above the line is a gain at this {COLUMNS[quality][0]}", fontsize=10)
        axis.legend(loc="best", fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)
