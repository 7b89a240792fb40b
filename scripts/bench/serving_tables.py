"""What `scripts.bench.serving` has measured, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.methods import KINDS

LATENCIES = ("first_token_ms", "per_token_ms", "end_to_end_ms")


def throughput_table(report: Mapping[int, Mapping[str, Any]]) -> str:
    """Tokens a second by system and load, each with its ratio to every reference."""
    loads, names = list(report), list(next(iter(report.values())))
    references = list(next(iter(next(iter(report.values())).values()))["vs"])
    lines = [["tokens/s, median (lowest .. highest slice)", *(f"{load} in flight" for load in loads)]]
    for name in names:
        cells = [report[load][name]["tokens_per_second"] for load in loads]
        lines.append([name, *(f"{c['median']:.0f} ({c['low']:.0f} .. {c['high']:.0f})" for c in cells)])
    for base in references:
        lines.append([f"against {base}"] + [""] * len(loads))
        for name in names:
            if name != base:
                cells = [report[load][name]["vs"][base] for load in loads]
                lines.append([f"  {name}", *(f"{c['median']:.2f} ({c['low']:.2f} .. {c['high']:.2f})" for c in cells)])
    return align(lines)


def latency_table(report: Mapping[int, Mapping[str, Any]]) -> str:
    """p50 / p90 / p99 of the three latencies."""
    lines = [["in flight", "system", "requests", "first token ms", "per token ms", "end to end ms"]]
    for load, rows in report.items():
        for name, row in rows.items():
            cells = [" / ".join(f"{v:.1f}" for v in row[key].values()) if row[key] else "-" for key in LATENCIES]
            lines.append([str(load), name, str(row["requests"]), *cells])
    return align(lines)


def check_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The check, one line a system."""
    lines = [["system", "prompts", "tokens", "perplexity", "accuracy %"]]
    for name, row in rows.items():
        accuracy = "-" if row["accuracy"] is None else f"{row['accuracy']:.1%} +-{row['accuracy_error']:.1%}"
        perplexity = f"{row['perplexity']:.2f} +-{row['perplexity_error']:.2f}"
        lines.append([name, str(row["prompts"]), f"{row['tokens']:.1f}", perplexity, accuracy])
    return align(lines)


def align(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def plot(report: Mapping[str, Any], path: Path, ours: Collection[str]) -> None:
    """Throughput, and median end-to-end latency, against requests in flight; one column a kind of prompt.

    Systems that are not `ours` are dashed; their latency does not count the wait for a batch to begin.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [kind for kind in KINDS if kind in report]
    figure, axes = plt.subplots(2, len(kinds), figsize=(6.2 * len(kinds), 8), squeeze=False, layout="constrained")
    for column, kind in enumerate(kinds):
        load = report[kind]["load"]
        xs = list(load)
        for name in next(iter(load.values())):
            style = {
                "linestyle": "-" if name in ours else "--",
                "marker": "o" if name in ours else "s",
                "markersize": 4,
            }
            rates = [load[x][name]["tokens_per_second"] for x in xs]
            low, high = ([abs(r[end] - r["median"]) for r in rates] for end in ("low", "high"))
            at = [int(x) for x in xs]
            axes[0][column].errorbar(at, [r["median"] for r in rates], yerr=(low, high), label=name, capsize=2, **style)
            timed = [x for x in xs if load[x][name]["end_to_end_ms"]]
            at = [int(x) for x in timed]
            axes[1][column].plot(at, [load[x][name]["end_to_end_ms"]["p50"] for x in timed], **style)
        axes[0][column].set(title=KINDS[kind], ylabel="useful tokens/s (median, lowest .. highest slice)")
        axes[0][column].set_ylim(bottom=0)
        axes[1][column].set(ylabel="end-to-end latency, median, ms", yscale="log")
        axes[1][column].yaxis.set_major_formatter("{x:.0f}")
        axes[1][column].yaxis.set_minor_formatter("{x:.0f}")
        axes[1][column].tick_params(axis="y", which="minor", labelsize=7)
        for axis in axes[:, column]:
            axis.set(xlabel="requests in flight", xscale="log")
            axis.set_xticks([int(x) for x in xs], [str(x) for x in xs])
            axis.xaxis.minorticks_off()
            axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=130)
