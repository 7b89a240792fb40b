"""What is told of a comparison of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtad.methods import METHODS


def summary(label: str, row: dict[str, Any]) -> dict[str, Any]:
    """A line of the table: ratios are to `speculative`, with their errors in the report's `evaluation`."""
    line: dict[str, Any] = {"setting": label}
    for name in ("tokens_per_second", "block_efficiency", "perplexity", "joules_per_token"):
        figure = row[name] or {"value": None, "vs": {}}
        line[name] = "none" if figure["value"] is None else figure["value"]
        line[f"{name}, ratio"] = figure["vs"].get("speculative", {}).get("ratio") or ""
    return line


def at_equal_quality(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each method the fastest setting whose texts the target finds no less likely than its own samples.

    Args:
        rows: of the table, one of them `sample`.
    """
    most = next(row["perplexity"] for row in rows if row["setting"] == "sample")
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["tokens_per_second"]):
        method = row["setting"].split()[0]
        if method not in found and (row["perplexity"] <= most or (method in METHODS and METHODS[method].lossless)):
            found[method] = {name: row[name] for name in ("setting", "tokens_per_second", "joules_per_token")}
    return found
