"""What the comparison has measured, as figures, tables and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.gate import median_interval
from scripts.bench.peers.catalog import PRECISIONS, System
from scripts.evaluation.report import markdown

EQUAL = "the best peer that keeps the quality"
"""Of those whose sampled texts are not clearly less likely than `sample`'s."""

Rates = Mapping[int, Sequence[float]]
"""Tokens per second by requests in flight, round by round."""


def summarise(
    systems: Sequence[System], rows: Iterable[Mapping[str, Any]], loads: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Figures of one size and precision.

    Returns:
        `systems`: of each its rates and their medians with 95 % intervals, by load, its check's gap, and the perplexity
        of its texts with that relative to `sample`'s of the same prompts and its standard error; `versions`; `against`:
        see `compare`, with all peers at the temperature of ours, and with those, at any temperature that was run, whose
        texts are not clearly less likely than `sample`'s.
    """
    rows = list(rows)
    gaps = {row["system"]: row["gap"] for row in rows if "gap" in row}
    surprises = {row["system"]: row["surprise"] for row in rows if "surprise" in row}
    plain = next((surprises[one.name] for one in systems if one.method == "sample" and one.name in surprises), None)
    cells = {(r["system"], r["load"], r["round"]): r["tokens"] / r["seconds"] for r in rows if "seconds" in r}
    rates = {
        one.name: {load: [cells[one.name, load, number] for number in range(rounds)] for load in loads}
        for one in systems
    }
    judged = {name: perplexity(own, plain) for name, own in surprises.items()} if plain else {}
    correct = [one for one in systems if not _is_worse(judged.get(one.name))]
    return {
        "versions": {name: version for row in rows for name, version in row.get("versions", {}).items()},
        "systems": {
            one.name: {
                "tokens_per_second": {load: median_interval(taken) for load, taken in rates[one.name].items()},
                "rates": rates[one.name],
                "batches": one.batches,
                "lossless": one.lossless,
                "greedy_gap": gaps.get(one.name),
                "perplexity": judged.get(one.name),
            }
            for one in systems
        },
        "against": {
            "the best peer": compare([one for one in systems if "temperature" not in one.job], rates),
            EQUAL: compare(correct, rates),
        },
    }


def _is_worse(judged: Mapping[str, float] | None) -> bool:
    """Whether texts are less likely than those of `sample`, by more than three errors: a dozen systems are judged."""
    return judged is not None and judged["ratio"] - 3 * judged["error"] > 1


def perplexity(surprise: Sequence[float], plain: Sequence[float]) -> dict[str, float]:
    """Of texts, and relative to that of `plain` sampling's texts of the same prompts, with one standard error.

    Args:
        surprise, plain: mean negative log-likelihood of each text, which all have the same length.
    """
    apart = [a - b for a, b in zip(surprise, plain, strict=True)]
    ratio, count = math.exp(statistics.fmean(apart)), len(apart)
    error = ratio * statistics.stdev(apart) / count**0.5 if count > 1 else math.nan
    return {"value": math.exp(statistics.fmean(surprise)), "ratio": ratio, "error": error}


def compare(systems: Sequence[System], rates: Mapping[str, Rates]) -> dict[str, dict[int, dict[str, Any]]]:
    """Each of our methods, on the engine that suits it best, against the best of all peers.

    Returns:
        by method and load: `system` and `peer`, those of the highest median; `ratio`, a `median_interval` of the paired
        ratios of tokens per second.
    """
    peers, found = [one.name for one in systems if one.peer], dict[str, dict[int, dict[str, Any]]]()
    if not peers:
        return {}
    for method in dict.fromkeys(one.method for one in systems if one.method):
        found[method] = {}
        for load in next(iter(rates.values())):
            own = [one.name for one in systems if one.method == method]
            best, peer = (max(names, key=lambda n: statistics.median(rates[n][load])) for names in (own, peers))
            ratios = [a / b for a, b in zip(rates[best][load], rates[peer][load], strict=True)]
            found[method][load] = {"system": best, "peer": peer, "ratio": median_interval(ratios)}
    return found


def table(found: Mapping[str, Any]) -> str:
    """Markdown tables of one size: tokens per second, and ratios with their 95 % intervals, by precision."""
    tables = []
    for precision, one in found.items():
        loads = list(next(iter(one["systems"].values()))["tokens_per_second"])
        lines = [[f"tokens/s, {PRECISIONS[precision]}", *map(str, loads), "perplexity, relative to `sample`"]]
        for name, row in one["systems"].items():
            label = name if row["batches"] else f"{name} (one at a time)"
            rates, judged = row["tokens_per_second"], row["perplexity"]
            shown = f"{judged['ratio']:.2f} ± {judged['error']:.2f}" if judged else "-"
            lines.append([label, *(f"{rates[load]['median']:.0f}" for load in loads), shown])
        tables.append(lines)
        for against, methods in one["against"].items():
            lines = [[f"{PRECISIONS[precision]}, relative to {against}", *map(str, loads)]]
            for method, cells in methods.items():
                lines.append([f"`{method}`", *(_shown(cells[load]["ratio"]) for load in loads)])
            for cells in list(methods.values())[:1]:
                lines.append(["which is", *(cells[load]["peer"] for load in loads)])
            tables.append(lines)
    return "\n\n".join(map(markdown, tables))


def _shown(figure: Mapping[str, float]) -> str:
    return f"{figure['median']:.2f} ({figure['low']:.2f} to {figure['high']:.2f})"


def plot(sets: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """A panel for each size and precision: our methods relative to `EQUAL`, against requests in flight."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    precisions = list(next(iter(sets.values())))
    wide = (5.4 * len(sets), 4 * len(precisions))
    figure, axes = plt.subplots(len(precisions), len(sets), figsize=wide, squeeze=False, layout="constrained")
    for column, (size, found) in enumerate(sets.items()):
        for axis, precision in zip(axes[:, column], precisions, strict=True):
            methods = found[precision]["against"][EQUAL]
            loads = list(next(iter(methods.values()), []))
            for method, cells in methods.items():
                ratios = [cells[load]["ratio"] for load in loads]
                bars = [[abs(r[end] - r["median"]) for r in ratios] for end in ("low", "high")]
                xs = range(len(loads))
                axis.errorbar(xs, [r["median"] for r in ratios], yerr=bars, label=method, marker="o", capsize=2)
            if methods:
                best = [max(cells[load]["ratio"]["median"] for cells in methods.values()) for load in loads]
                message = f"our best is {min(best):.2f} to {max(best):.2f} times the best that keeps the quality"
                axis.set_title(f"{size}, {PRECISIONS[precision]}:\n{message}", fontsize=10)
            axis.axhline(1, color="gray", linestyle="--", linewidth=1)
            axis.set_xticks(range(len(loads)), list(map(str, loads)))
            axis.set(xlabel="requests in flight", ylabel="tokens/s, relative to it")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
