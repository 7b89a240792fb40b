"""The tables of what the comparison has measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.intervals import median_interval, paired_ratio, shown
from scripts.bench.peers.catalog import PRECISIONS
from scripts.results import Rows


def tables(figures: Mapping[str, Any]) -> dict[str, Rows]:
    """Tables of each size and precision, such as `78M-float32`, which has the tokens per second.

    With `-peers` and `-quality`, each of our methods, on the engine that suits it best, against the best peer at the
    same temperature, and against the best, at any temperature, that keeps the quality; with `-auto`, automatic
    drafts against `sample` and against the method's best fixed draft.
    """
    return {
        f"{size}-{precision}{name}": [[f"{rows[0][0]}, {PRECISIONS[precision]}", *rows[0][1:]], *rows[1:]]
        for size, sets in figures["sets"].items()
        for precision, systems in sets.items()
        for name, rows in _tables(systems).items()
    }


BARS = {
    "sample": "without drafts",
    "greedy": "greedy, without drafts",
    "block": "block, drafts of 4",
    "block auto": "block, the default",
    "mtad": "mtad, drafts of 4",
}
"""Methods that have a bar, and its name."""


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Tokens per second of our methods and of the best peer, as bars, with the quality under each.

    It is of the first size, precision and load. Whiskers are `median_interval`s.
    """
    from matplotlib.figure import Figure

    systems = next(iter(next(iter(figures["sets"].values())).values()))
    load = next(iter(next(iter(systems.values()))["rates"]))
    rates = {name: median_interval(one["rates"][load]) for name, one in systems.items()}

    def fastest(names: Sequence[str]) -> list[str]:
        return sorted(names, key=lambda name: rates[name]["median"])[-1:]

    chosen = {label: fastest([n for n, one in systems.items() if one["method"] == m]) for m, label in BARS.items()}
    bars = {name: label for label, names in chosen.items() for name in names}
    bars |= {name: f"{name},\nbest other library" for name in fastest(_keeping(systems))}
    figure = Figure((1 + 1.7 * len(bars), 4), layout="constrained")
    axis = figure.subplots()
    heights = [rates[name]["median"] for name in bars]
    whiskers = [[abs(rates[name][end] - rates[name]["median"]) for name in bars] for end in ("low", "high")]
    drawn = axis.bar(range(len(bars)), heights, yerr=whiskers, capsize=4)
    axis.bar_label(drawn, [f"{height:.0f}" for height in heights], label_type="center", color="white")
    quality = [systems[name]["perplexity"] for name in bars]
    labels = [
        f"{label}\nperplexity {q['ratio']:.2f} ± {q['error']:.2f}"
        for label, q in zip(bars.values(), quality, strict=True)
    ]
    axis.set_xticks(range(len(bars)), labels, fontsize=9)
    axis.set_ylabel("tokens per second")
    flight = "One request" if load == "1" else f"{load} requests"
    title = f"{flight} at a time. Perplexity: below 1 the text is likelier than plain sampling's"
    axis.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)


def _keeping(systems: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Peers that keep the quality: their texts are not less likely than those of `sample` by more than three errors."""
    judged = {name: one["perplexity"] for name, one in systems.items() if not one["method"]}
    return [name for name, one in judged.items() if one["ratio"] - 3 * one["error"] <= 1]


def _tables(systems: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[str]]]:
    loads, methods = list(next(iter(systems.values()))["rates"]), dict[str, list[str]]()
    for name, one in systems.items():
        methods.setdefault(one["method"], []).append(name)
    peers = methods.pop("", [])

    def best(names: Sequence[str], load: str) -> str:
        return max(names, key=lambda name: statistics.median(systems[name]["rates"][load]))

    def against(own: Sequence[str], others: Sequence[str]) -> list[str]:
        taken = [[systems[best(names, load)]["rates"][load] for names in (own, others)] for load in loads]
        return [shown(paired_ratio(*rates)) for rates in taken]

    found = {"": [["tokens/s", *loads, "perplexity, relative to `sample`"]]}
    for name, one in systems.items():
        label, judged = name if one["batches"] else f"{name} (one at a time)", one["perplexity"]
        cells = [shown(median_interval(rates), 0) for rates in one["rates"].values()]
        found[""].append([label, *cells, f"{judged['ratio']:.2f} ± {judged['error']:.2f}"])
    same, keeping = [name for name in peers if ", T=" not in name], _keeping(systems)
    for name, title, chosen in (("peers", "peer", same), ("quality", "peer that keeps the quality", keeping)):
        if chosen:
            lines = [[f"`{method}`", *against(own, chosen)] for method, own in methods.items()]
            which = ["which is", *(best(chosen, load) for load in loads)]
            found[f"-{name}"] = [[f"relative to the best {title}", *loads], *lines, which]
    lines = []
    for name, one in systems.items():
        method, _, draft = one["method"].partition(" ")
        for base, title in (("sample", "`sample`"), (method, "the best fixed draft")) if draft == "auto" else ():
            others = [n for n in systems if systems[n]["library"] == one["library"] and n != name]
            others = [n for n in others if systems[n]["method"].partition(" ")[0] == base]
            lines += [[f"{name}, relative to {title}", *against([name], others)]] if others else []
    return found | ({"-auto": [["automatic drafts", *loads], *lines]} if lines else {})
