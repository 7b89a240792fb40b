"""What `scripts.bench.steps` has measured, as tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.evaluation.report import markdown

Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of one sweep: milliseconds by tokens per row."""
    sweep, tokens = rows[0]["sweep"], sorted({row["tokens"] for row in rows})
    lines = [
        [
            "engine",
            "size",
            sweep if sweep != "size" else "rows",
            *(f"{n} token{'s' * (n > 1)}, ms" for n in tokens),
            "last : first",
        ]
    ]
    cells = {(*_place(row), row["tokens"]): row["ms"]["median"] for row in rows}
    for place in dict.fromkeys(map(_place, rows)):
        taken = [cells[*place, n] for n in tokens]
        lines.append([*map(str, place), *(f"{one:.2f}" for one in taken), f"{taken[-1] / taken[0]:.2f}"])
    return markdown(lines)


def _place(row: Row) -> tuple[str, str, int]:
    return row["engine"], row["size"], row["rows" if row["sweep"] == "size" else row["sweep"]]


def plot(sets: Mapping[str, Sequence[Row]], path: Path) -> None:
    """A panel for each sweep: milliseconds of a step by engine.

    Steps have 5 tokens per row. The sweep of rows has one panel more: tokens per row, with one row.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(sweep, x) for sweep in sets for x in (("tokens", sweep) if sweep == "rows" else (sweep,))]
    lines = -(-len(panels) // 3)
    figure, axes = plt.subplots(lines, 3, figsize=(15, 4.2 * lines), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (sweep, x) in zip(axes.flat, panels, strict=False):
        fixed = {"tokens": {"rows": 1}}.get(x, {"tokens": 5})
        fixed |= {} if x == "size" else {"size": sets[sweep][0]["size"]}
        _plot_growth(axis, [row for row in sets[sweep] if fixed.items() <= row.items()], x)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_growth(axis: Any, rows: Sequence[Row], x: str) -> None:
    grown = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == engine]
        taken = [row["ms"]["median"] for row in own]
        axis.plot([str(row[x]) for row in own], taken, marker="o", label=engine)
        grown.append(taken[-1] / taken[0])
    ends = f"{x}, from {rows[0][x]} to {rows[-1][x]}"
    axis.set_title(f"{ends}:\na step costs {min(grown):.1f} to {max(grown):.1f} times as much", fontsize=11)
    axis.set(xlabel=f"{x} per row" if x == "tokens" else x, ylabel="ms per step", yscale="log")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, which="both")
