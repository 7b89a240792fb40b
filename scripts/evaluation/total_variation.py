"""What tokens per pass cost in total variation per token: temperature, top-p and `budget` on one axis.

    python -m scripts.evaluation.total_variation --pair FOLDER

All curves begin with `block` at temperature 1 without filters; the distance is that from its law, the target's own.
`block` at other temperatures and top-p has a law of its own, whose distance is known at each token of its texts;
`budget` reports how far it moved each. All drafts have `DRAFT` tokens. ± is one standard error over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mtad.params import DecodingParams
from runtime.commands.entry import PLACEMENT, Parser, add_options, command, given_options
from runtime.config import RuntimeConfig
from scripts.evaluation.figures import Figure
from scripts.evaluation.report import cell
from scripts.paths import RESULTS, ROOT

DRAFT = 8
BASE = DecodingParams(method="block", draft_len=DRAFT)
CURVES: dict[str, list[DecodingParams]] = {
    "temperature": [replace(BASE, temperature=value) for value in (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)],
    "top_p": [replace(BASE, top_p=value) for value in (1.0, 0.98, 0.95, 0.9, 0.8)],
    "divergence": [replace(BASE, method="budget", divergence=value) for value in (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)],
}
"""By the parameter that changes."""


@command
def main() -> None:
    from scripts.results import save, table

    own = Parser(prog="scripts.evaluation.total_variation", description=(__doc__ or "").splitlines()[0])
    own.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="pair folder")
    own.add_argument("--prompts", type=int, help="so many prompts of source code (default: all)")
    own.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    add_options(own, RuntimeConfig, PLACEMENT)
    options = own.parse_args()
    figures = measured(options)
    path = options.results / "total-variation.json"
    save(path, "scripts.evaluation.total_variation", figures)
    plot(figures, path.with_suffix(".png"))
    print(f"{table(tables(figures)['curves'])}\nwritten to {path} and .png")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per pass and total variation per token of each point, from one text to each prompt."""
    from runtime.tuning.measure import answer, law_change
    from scripts.evaluation.measure import Writers
    from scripts.evaluation.prompts import open_set

    config = RuntimeConfig(prefix_tokens=0, **given_options(options, RuntimeConfig))
    writers = Writers(options.pair, config, scored=True)
    prompts = [writers.llm.tokenize(prompt) for prompt in open_set("code", options.prompts).prompts]
    curves: dict[str, Any] = {name: [] for name in CURVES}
    for name, params in ((name, params) for name, points in CURVES.items() for params in points):
        seeded = [(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(prompts)]
        results, _ = answer(writers.llm, [one for given in seeded for one in writers.llm.requests(*given)])
        sums = np.zeros((3, len(prompts)))
        for at, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            count, moved = len(result.token_ids), result.statistics.divergence_spent
            if params.spec.lossless:
                moved = float(law_change(writers.llm, prompt, result.token_ids, params).sum())
            sums[:, at] = count, result.statistics.target_passes, moved
        pairs = {"tokens_per_pass": sums[[0, 1]], "total_variation": sums[[2, 0]]}
        point = {figure: Figure(*pair).with_error() for figure, pair in pairs.items()}
        curves[name].append({"value": getattr(params, name), **point})
    return {"prompts": len(prompts), "draft_len": DRAFT, "curves": curves}


def tables(figures: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """`curves`: each curve's points."""
    lines = [["parameter", "value", "total variation per token", "tokens per pass"]]
    for name, points in figures["curves"].items():
        for point in points:
            cells = cell(point["total_variation"], 1, ".3f"), cell(point["tokens_per_pass"], 1, ".2f")
            lines.append([f"`{name}`", f"{point['value']:g}", *cells])
    return {"curves": lines}


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """The three curves."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 5), layout="constrained")
    for name, points in figures["curves"].items():
        xs, ys = ([point[of]["value"] for point in points] for of in ("total_variation", "tokens_per_pass"))
        errors = [point["tokens_per_pass"]["error"] for point in points]
        axis.errorbar(xs, ys, errors, marker="o", markersize=4, lw=1, capsize=2, label=name)
        for x, y, point in zip(xs, ys, points, strict=True):
            axis.annotate(f"{point['value']:g}", (x, y), (3, 4), textcoords="offset points", fontsize=7)
    axis.set(xlabel="total variation per token from the target's law", ylabel="tokens per target pass")
    axis.set_title(f"source code, drafts of {figures['draft_len']} tokens", fontsize=10)
    axis.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
