"""Draw the loss curves of both models of the pair from their committed logs, as training.png.

python -m scripts.demo.plot
"""

from __future__ import annotations

import argparse
import json

import matplotlib

from runtime.commands.entry import Parser, command
from scripts.paths import DEMO

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@command
def main() -> None:
    """Write the picture: one panel a kind of text, training and development loss of both models."""
    Parser(
        prog="scripts.demo.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    for name, color in (("target", "tab:blue"), ("auxiliary", "tab:orange")):
        log = [json.loads(line) for line in (DEMO / "pair" / name / "training.jsonl").read_text().splitlines()]
        for panel, kind in zip(panels, ("sql", "code"), strict=True):
            millions = [e["tokens"] / 1e6 for e in log]
            panel.plot(millions, [e[f"train_{kind}"] for e in log], color=color, alpha=0.5, label=f"{name}, training")
            held = [e for e in log if f"development_{kind}" in e]
            panel.plot(
                [e["tokens"] / 1e6 for e in held],
                [e[f"development_{kind}"] for e in held],
                "o",
                markersize=3,
                color=color,
                label=f"{name}, development",
            )
    for panel, title in zip(panels, ("SQL answers", "code"), strict=True):
        panel.set(title=title, xlabel="million tokens seen", ylabel="nats per token", yscale="log")
        panel.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=8)
    figure.savefig(DEMO / "training.png", dpi=110)


if __name__ == "__main__":
    main()
