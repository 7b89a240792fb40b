"""What `scripts.bench.steps` has measured, as tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.evaluation.report import markdown

Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of one sweep: milliseconds by tokens per row; of `rerun`, ratios with 95 % intervals."""
    if rows[0]["sweep"] == "rerun":
        lines = [["rerun relative to columns", "rows", "`mtad`", "`mmtad`"]]
        for row in rows:
            ratios = (row[method]["ratio"] for method in ("mtad", "mmtad"))
            shown = [f"{r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for r in ratios]
            lines.append([f"{row['size']}, {row['engine']}", str(row["rows"]), *shown])
        return markdown(lines)
    sweep, tokens = rows[0]["sweep"], sorted({row["tokens"] for row in rows})
    lines = [
        ["engine", "size", sweep if sweep != "size" else "rows", *(f"{n} tokens, ms" for n in tokens), "last : first"]
    ]
    cells = {(*_place(row), row["tokens"]): row["ms"]["median"] for row in rows}
    for place in dict.fromkeys(map(_place, rows)):
        taken = [cells[*place, n] for n in tokens]
        lines.append([*map(str, place), *(f"{one:.2f}" for one in taken), f"{taken[-1] / taken[0]:.2f}"])
    return markdown(lines)


def _place(row: Row) -> tuple[str, str, int]:
    return row["engine"], row["size"], row["rows" if row["sweep"] == "size" else row["sweep"]]


def plot(sets: Mapping[str, Sequence[Row]], path: Path) -> None:
    """A panel for each sweep: milliseconds of a step of 5 tokens per row by engine, or the ratios of `rerun`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(sets), figsize=(5 * len(sets), 4.2), squeeze=False, layout="constrained")
    for axis, (sweep, rows) in zip(axes[0], sets.items(), strict=True):
        if sweep == "rerun":
            for number, method in enumerate(("mtad", "mmtad")):
                ratios = [row[method]["ratio"] for row in rows]
                xs = [place + 0.4 * number for place in range(len(rows))]
                bars = [[abs(r[end] - r["median"]) for r in ratios] for end in ("low", "high")]
                axis.bar(xs, [r["median"] for r in ratios], 0.4, yerr=bars, label=method)
            axis.set_xticks(
                range(len(rows)), [f"{r['size']}\n{r['engine']}\n{r['rows']} rows" for r in rows], fontsize=6
            )
            worst = [max(row[method]["ratio"]["median"] for row in rows) for method in ("mtad", "mmtad")]
            axis.set_title(
                f"running the tree again costs up to {worst[0]:.2f}\n(mtad) and {worst[1]:.2f} (mmtad) times"
            )
            axis.set(ylabel="rerun relative to columns")
            axis.legend()
            continue
        grown = []
        for engine in dict.fromkeys(row["engine"] for row in rows):
            size = rows[0]["size"]
            own = [
                r for r in rows if r["engine"] == engine and r["tokens"] == 5 and (sweep == "size" or r["size"] == size)
            ]
            taken = [row["ms"]["median"] for row in own]
            axis.plot([str(row[sweep]) for row in own], taken, marker="o", label=engine)
            grown.append(taken[-1] / taken[0])
        axis.set_title(f"a step of 5 tokens grows {min(grown):.1f} to {max(grown):.1f} times\nwith {sweep}")
        axis.set(xlabel=sweep, ylabel="ms", yscale="log")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
