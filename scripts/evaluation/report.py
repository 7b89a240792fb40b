"""Tables and pictures of what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.evaluation.figures import REPEATED_SPAN
from scripts.evaluation.gain import CURVES, MARGINS, SPEEDS, TEMPERATURES, on_curve

COLUMNS: dict[str, tuple[str, float, str]] = {
    "accuracy": ("accuracy %", 100, ".1f"),
    "perplexity": ("perplexity", 1, ".2f"),
    "tokens_per_second": ("tokens/s", 1, ".0f"),
    "block_efficiency": ("block efficiency", 1, ".2f"),
    "acceptance_rate": ("acceptance", 1, ".2f"),
    "distinct_2": ("distinct-2", 1, ".2f"),
    "repeated_share": (f"repeats {REPEATED_SPAN}+ %", 100, ".0f"),
    "tokens": ("tokens", 1, ".0f"),
    "joules_per_token": ("J/token", 1, ".3f"),
}
"""Figures shown in tables: heading, factor, format."""

COMPARED = ("accuracy", "perplexity", "tokens_per_second", "block_efficiency", "distinct_2", "joules_per_token")


def table(rows: Mapping[str, Any], energy: str | None = None) -> str:
    """All settings as a Markdown table, one line each; ± is one standard error over prompts.

    Args:
        rows: figures by label.
        energy: what the meter is called, or `none`; None where none was looked for.
    """
    names = [n for n in COLUMNS if any(row[n] for row in rows.values()) or (energy and n == "joules_per_token")]
    names += [n for n in next(iter(rows.values())) if n.startswith("pass@") and n != "pass@1"]  # that is accuracy
    lines = [["setting", *(_heading(name) for name in names)]]
    for label, row in rows.items():
        cells = [_cell(name, row[name], "value") for name in names]
        if energy and not any(other["joules_per_token"] for other in rows.values()):
            cells[names.index("joules_per_token")] = energy.split(" ")[0]
        lines.append([label, *cells])
    return markdown(lines)


def comparison(rows: Mapping[str, Any], base: str) -> str:
    """Differences and ratios to one setting, paired over prompts, as a Markdown table."""
    names = [n for n in COMPARED if any(row[n] and base in row[n]["vs"] for row in rows.values())]
    signs = {n: next(k for row in rows.values() if row[n] for v in row[n]["vs"].values() for k in v) for n in names}
    lines = [[f"against {base}", *(f"{_heading(n)} ({'x' if signs[n] == 'ratio' else '+/-'})" for n in names)]]
    for label, row in rows.items():
        if label != base:
            cells = [_cell(n, (row[n] or {"vs": {}})["vs"].get(base), signs[n]) for n in names]
            lines.append([label, *cells])
    return markdown(lines)


def gain_table(gained: Mapping[str, Any]) -> str:
    """Gains at equal quality as a Markdown table, the largest first; ± is one standard error, by bootstrap."""
    qualities = list(next(iter(gained.values()))["at"])
    heads = [f"at equal {name.replace('_', '-')}" for name in qualities]
    judged = [name for name in MARGINS if any(name in row["not_inferior"] for row in gained.values())]
    bounds = [f"{name} within {MARGINS[name][1]:g} of {MARGINS[name][0]}" for name in judged]
    lines = [["setting", "gain, tokens per pass", "gain, tokens/s", *heads, *bounds]]

    def cell(figure: Mapping[str, float] | None) -> str:
        return f"{figure['value']:.2f} ± {figure['error']:.2f}" if figure else "no match"

    def size(row: Mapping[str, Any]) -> float:
        own = row["gain"]["block_efficiency"]
        return -own["value"] if own else 0.0

    for label, row in sorted(gained.items(), key=lambda entry: size(entry[1])):
        matches = [row["at"][name] for name in qualities]
        at = [m and f"{cell(m['block_efficiency'])} (T {m['temperature']['value']:.2f})" for m in matches]
        verdicts = [row["not_inferior"].get(name, "-") for name in judged]
        cells = [*(cell(row["gain"][speed]) for speed in SPEEDS), *(text or "no match" for text in at), *verdicts]
        lines.append([label, *cells])
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of equal width; the first line is the heading."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |" for line in lines]
    return "\n".join([rows[0], f"|{'|'.join('-' * (w + 2) for w in widths)}|", *rows[1:]])


def _heading(name: str) -> str:
    return COLUMNS[name][0] if name in COLUMNS else f"{name} %"


def _cell(name: str, figure: Mapping[str, Any] | None, key: str) -> str:
    if not figure or figure.get(key) is None:
        return "-"
    _, scale, form = COLUMNS.get(name, ("", 100, ".1f"))
    if key == "ratio":
        scale, form = 1, ".3f"
    elif key == "difference":
        form = "+" + form
    error = figure["error"]
    return f"{figure[key] * scale:{form}}" + ("" if error is None else f" ± {error * scale:{form.lstrip('+')}}")


def plot_settings(sets: Mapping[str, Any], path: Path) -> None:
    """Per set: quality against speed, and repetition against perplexity."""
    panels = [
        (name, x, y)
        for name, one in sets.items()
        for x, y in (
            ("tokens_per_second", "accuracy"),
            ("tokens_per_second", "perplexity"),
            ("perplexity", "distinct_2"),
        )
        if any(row[y] for row in one["settings"].values())
    ]
    wide = max(sum(name == own for own, _, _ in panels) for name in sets)
    plt = _pyplot()
    figure, axes = plt.subplots(len(sets), wide, figsize=(5.2 * wide, 4.2 * len(sets)), squeeze=False)
    for line, name in enumerate(sets):
        own = [(x, y) for other, x, y in panels if other == name]
        for axis in axes[line][len(own) :]:
            axis.set_visible(False)
        for axis, (x, y) in zip(axes[line], own, strict=False):
            for label, row in sets[name]["settings"].items():
                if row[x] and row[y] and row[x]["value"] is not None:
                    at = [row[key]["value"] * COLUMNS[key][1] for key in (x, y)]
                    bars = [(row[key]["error"] or 0.0) * COLUMNS[key][1] for key in (x, y)]
                    marker = "s" if label.startswith("hf ") else "o"
                    axis.errorbar(*at, xerr=bars[0], yerr=bars[1], fmt=marker, capsize=2, markersize=4)
                    axis.annotate(label, at, textcoords="offset points", xytext=(5, 4), fontsize=7)
            axis.set(title=name, xlabel=COLUMNS[x][0], ylabel=COLUMNS[y][0])
            axis.margins(0.2)
            axis.grid(alpha=0.3)
            if y == "perplexity":
                axis.invert_yaxis()
    figure.suptitle("bars are one standard error over prompts; perplexity under the target, lower is up", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_gain(sets: Mapping[str, Any], path: Path) -> None:
    """Per set and quality that is held equal, tokens per pass against it: methods, and the curve of lossless decoding.

    Points above the curve have gained; names stand at the right, in the order of the points.
    """
    plt = _pyplot()
    panels = [(name, quality) for name, one in sets.items() for quality in next(iter(one["gain"].values()))["at"]]
    figure, axes = plt.subplots(1, len(panels), figsize=(7.5 * len(panels), 6), squeeze=False)
    for axis, (name, quality) in zip(axes[0], panels, strict=True):
        rows, (heading, factor, _) = sets[name]["settings"], COLUMNS[quality]

        def places(labels: Iterable[str], key: str, rows: Any = rows, factor: float = factor) -> list[float]:
            return [rows[label][key]["value"] * (factor if key != "block_efficiency" else 1) for label in labels]

        for base, style in zip(CURVES, ("k-o", "k:s"), strict=True):
            own = [label for label in rows if on_curve(label) and label.split()[0] == base]
            text = f"{base} at temperatures {TEMPERATURES[0]:g} to {TEMPERATURES[-1]:g}"
            axis.plot(places(own, quality), places(own, "block_efficiency"), style, markersize=3, lw=1, label=text)
        shown = sorted(sets[name]["gain"], key=lambda label: rows[label]["block_efficiency"]["value"])
        xs, ys = places(shown, quality), places(shown, "block_efficiency")
        bars = [rows[label][quality]["error"] * factor for label in shown]
        axis.errorbar(xs, ys, xerr=bars, fmt="o", markersize=4, lw=0.8)
        axis.margins(0.05)
        line = {"arrowstyle": "-", "lw": 0.4, "color": "gray", "relpos": (0, 0.5)}
        for height, label, x, y in zip(np.linspace(0, 1, len(shown)), shown, xs, ys, strict=True):
            axis.annotate(label, (x, y), (1.02, height), "data", "axes fraction", arrowprops=line)
            axis.texts[-1].set(fontsize=7, verticalalignment="center")
        axis.set(xlabel=heading)
        axis.set_title(f"{name}: above the line is a gain at equal {quality.replace('_', '-')}", fontsize=10)
        axis.set(ylabel="tokens per target pass")
        axis.grid(alpha=0.3)
        axis.legend(loc="best", fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


CURVE_PANELS = ("accuracy", "perplexity", "acceptance_rate", "block_efficiency", "tokens_per_second", "distinct_2")


def plot_curves(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One line of panels a curve: each figure against the parameter, a line a method; references are dashed."""
    plt = _pyplot()
    names = [n for n in CURVE_PANELS if any(p["figures"][n] for c in curves for p in c["points"])]
    size = (3.6 * len(names), 3.1 * len(curves))
    figure, axes = plt.subplots(len(curves), len(names), figsize=size, squeeze=False)
    for line, curve in enumerate(curves):
        for axis, name in zip(axes[line], names, strict=True):
            factor = COLUMNS[name][1]
            for method in dict.fromkeys(point["method"] for point in curve["points"]):
                own = [p for p in curve["points"] if p["method"] == method and p["figures"][name]]
                own = [p for p in own if p["figures"][name]["value"] is not None]
                ys = [p["figures"][name]["value"] * factor for p in own]
                bars = [(p["figures"][name]["error"] or 0.0) * factor for p in own]
                xs = [p["value"] for p in own]
                axis.errorbar(xs, ys, yerr=bars, marker="o", markersize=3, capsize=2, label=method)
            for number, (label, row) in enumerate(curve["references"].items()):
                if row[name] and row[name]["value"] is not None:
                    style = {"linestyle": ("--", ":")[number % 2], "color": "gray", "linewidth": 1}
                    axis.axhline(row[name]["value"] * factor, label=label, **style)
            axis.set(title=f"{curve['set']}: {COLUMNS[name][0]}", xlabel=curve["parameter"])
            axis.title.set_fontsize(9)
            axis.grid(alpha=0.3)
            if not any(point["figures"][name] for point in curve["points"]):
                axis.set_axis_off()
                axis.set_title("")
    figure.legend(*axes[-1][-1].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["figure.constrained_layout.use"] = True
    return plt


def plain(value: Any) -> Any:
    """`value` without numbers that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value
